"""Estimates gradient noise from gradients at two batch sizes, micro-batch and step (McCandlish et al. 2018).

The expected squared norm of a mean gradient over B prompt groups is |mu|^2 + tr(Sigma) / B. Micro-batches measure it at
a small B and the step's gradient at a large B, which gives two equations for two unknowns (arXiv 1812.06162, appendix
A.1). OTBTrainer uses `GradientNoise` if `measure_gradient_noise` is set.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from otb.methods import Method, Step

ROW = "row"  # key in a batch: each rollout's row before TRL shuffles them


def noise_and_signal(micro_batch: float, step: float, groups_per_micro_batch: int, groups: int) -> tuple[float, float]:
    """Returns (tr(Sigma), |mu|^2) of one prompt group's gradient: noise and signal.

    Both estimates are unbiased for independent groups; the signal can therefore come out negative.

    micro_batch: squared norm of a micro-batch's mean gradient over `groups_per_micro_batch` groups, averaged over the
    micro-batches. step: squared norm of the mean gradient over all `groups` of the step.
    """
    small, large = groups_per_micro_batch, groups
    noise = (micro_batch - step) / (1 / small - 1 / large)
    return noise, (large * step - small * micro_batch) / (large - small)


def verl_noise(verl_power: float, gradient_norm: float, rollouts: int) -> float:
    """Returns (total power - signal) / (n - 1) as verl logs it, with n = rollouts. It serves only for comparison.

    It subtracts the squared norm of a gradient over parameters from a power over logits, and the two have no common
    normaliser.
    """
    return (verl_power - gradient_norm**2) / max(1, rollouts - 1)


class GradientNoise(Method):
    """Measures the gradient noise of every optimizer step on micro-batches of whole prompt groups."""

    def __init__(self) -> None:
        self._norms: BackwardNorms | None = None  # from the first backward pass on
        self._squares: list[Tensor] = []  # squared gradient norms of the micro-batches since the last optimizer step

    def finish(self, step: Step) -> None:
        """Numbers the rollouts before TRL shuffles them. Raises ValueError for rows with images."""
        if "pixel_values" in step.output:
            raise ValueError(
                "measure_gradient_noise=True puts the rollouts of a prompt group together again, but the rows of "
                "pixel_values are patches, not rollouts. Use measure_gradient_noise=False."
            )
        ids = step.output["completion_ids"]
        step.output[ROW] = torch.arange(len(ids), device=ids.device)

    def batches(self, batches: list[dict]) -> list[dict]:
        """Puts prompt groups together again, because micro-batches that share a group are not independent."""
        return whole_groups(batches, torch.cat([batch.pop(ROW) for batch in batches]))

    def before_micro_batch(self) -> None:
        accelerator = self.trainer.accelerator
        if self._norms is None:
            self._norms = BackwardNorms(accelerator.unwrap_model(self.trainer.model).parameters())
        self._norms.start(accelerator.device)

    def after_micro_batch(self, loss: Tensor) -> None:
        assert self._norms is not None, "before_micro_batch comes first"
        self._squares.append(self._norms.take())

    def gradient(self, norm):
        trainer, metrics = self.trainer, self.trainer._metrics["train"]
        squares, self._squares = torch.stack(self._squares), []
        count = len(squares)  # TRL divides a micro-batch's loss by it, so `squares` are norms of gradients / count
        squares = trainer.accelerator.gather(squares)
        rollouts, group_size = trainer.args.per_device_train_batch_size, trainer.num_generations
        noise, signal = noise_and_signal(
            float(squares.mean()) * count**2,
            float(norm) ** 2,
            rollouts // group_size,
            len(squares) * rollouts // group_size,
        )
        measured = {"gradient_noise": noise, "gradient_signal": signal}
        if "verl_power" in metrics:
            measured["verl_noise"] = verl_noise(metrics["verl_power"][-1], float(norm), len(squares) * rollouts)
        trainer.record(measured)
        return norm


class BackwardNorms:
    """Measures the squared gradient norm of backward passes without copying a gradient.

    A hook on a parameter gets what one backward adds to its `.grad`; under DDP it runs before the average over the
    processes. Between `take` and `start` nothing is counted, because the backwards of exact norms run the same hooks.
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
        """Starts to count at 0."""
        self._sum = torch.zeros((), device=device)

    def take(self) -> Tensor:
        """Returns the squared gradient norm, a scalar, of the backward passes since `start`, and stops counting."""
        squared_norm, self._sum = self._sum, None
        assert squared_norm is not None, "start comes before take"
        return squared_norm


def whole_groups(batches: list[dict], order: Tensor) -> list[dict]:
    """Returns micro-batches of the same sizes with the rows in their original order, so prompt groups are whole again.

    order: each row's original position, in the order of the batches. The values of a batch are tensors or lists with
    one row per rollout, or scalars or None, which all batches share.
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
    """Tells whether a value of a batch has one row per rollout."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
