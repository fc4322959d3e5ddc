"""Gradient noise from the gradients of micro-batches: the estimator of two batch sizes (McCandlish et al. 2018).

The squared norm of a mean over B prompt groups is |mu|^2 + tr(Sigma) / B on average. Micro-batches give it at a small
B, the step's gradient at a large one, and two equations have two unknowns (arXiv 1812.06162, appendix A.1). Called by
the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def noise_and_signal(micro_batch: float, step: float, groups_per_micro_batch: int, groups: int) -> tuple[float, float]:
    """(tr(Sigma), |mu|^2) of one prompt group's gradient; both unbiased for independent groups, the signal may be < 0.

    micro_batch: mean over micro-batches of the squared norm of their mean gradient, of `groups_per_micro_batch` groups
    each. step: squared norm of the mean gradient of all `groups` of the step.
    """
    small, large = groups_per_micro_batch, groups
    noise = (micro_batch - step) / (1 / small - 1 / large)
    return noise, (large * step - small * micro_batch) / (large - small)


class BackwardNorms:
    """Squared gradient norm of a backward pass, without a copy of any gradient.

    A hook on a parameter sees what one backward adds to its `.grad`; under DDP, before the processes are averaged.
    Between `take` and `start` nothing is added: exact norms go through the same hooks.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._sum: Tensor | None = None
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        if self._sum is not None:
            self._sum = self._sum + torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()

    def start(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)

    def take(self) -> Tensor:
        """Of what ran since `start`, scalar."""
        found, self._sum = self._sum, None
        return found


def whole_groups(batches: list[dict], order: Tensor) -> list[dict]:
    """Micro-batches of the same sizes with the rows put back in their order: rows of a prompt group stand together.

    order: each row's place, in the order in which the batches hold them. A value is a tensor or list with a row per
    rollout, or a scalar or None, which all batches share.
    """
    sizes, places = [], order.argsort()
    for batch in batches:
        sizes.append(next(len(value) for value in batch.values() if is_rows(value)))
    regrouped: list[dict] = [{} for _ in batches]
    for name, first in batches[0].items():
        if not is_rows(first):
            parts = [first] * len(batches)
        elif isinstance(first, Tensor):
            parts = torch.cat([batch[name] for batch in batches])[places.to(first.device)].split(sizes)
        else:
            rows = [row for batch in batches for row in batch[name]]
            ordered = iter([rows[place] for place in places.tolist()])
            parts = [[next(ordered) for _ in range(size)] for size in sizes]
        for batch, part in zip(regrouped, parts, strict=True):
            batch[name] = part
    return regrouped


def is_rows(value) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
