"""Makes only the forwards and backwards that the gradient of the loss needs.

`LeanLoss` is in OTBTrainer's list of methods. It saves three things, and none of them changes the gradient beyond
rounding:

    padding         rollouts of similar length are computed together; a chunk is as wide as its longest rollout
    backwards       a rollout whose advantages are all 0 has no gradient, so its forward (for metrics) keeps no graph
    a forward       if a pass before the loss (for score norms) used the same weights, the loss reuses that pass

`applies` says when this is possible. It is not with several processes, which must all make the same number of forwards,
nor with terms of the loss that read more than advantages times log-probabilities. If it is not possible, or with
`lean_steps=False`, every pass is TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from otb.loss_inputs import per_position, response_mask
from otb.methods import Method
from otb.records.config_keys import flatten
from otb.rollouts import joined
from otb.training.options import CHUNKS

ROW = "kept_row"  # key in a batch: the row of each rollout in the kept pass
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NOISY = ("drop", "jitter", "noise")  # parts of option names; such options make two forwards of one model differ


class KeptPass(NamedTuple):
    """Holds a pass over a generation that the loss can reuse.

    log_probs, entropies: (B, C), in the order of the batch before TRL shuffles it. has_graph: (B,) bool, True if a
    gradient can flow back through the row's log_probs. first: the number of the pass's first row, counted over all kept
    passes.
    """

    log_probs: Tensor
    entropies: Tensor
    has_graph: Tensor
    first: int


class LeanLoss(Method):
    """Leaves out the work of the loss that contributes nothing to the gradient."""

    def __init__(self):
        self._kept_pass: KeptPass | None = None  # of the last generation, until its loss
        self._rows_kept = 0  # in all passes kept so far
        self._loss_inputs: dict | None = None  # None except while a lean loss is computed

    def applies(self, batch: dict) -> bool:
        """Tells whether this process may skip the backward of rollouts whose advantages are all 0.

        Models with experts are excluded: an expert that only such rollouts reach would get no gradient instead of a
        gradient of 0, and Adam treats the two differently.
        """
        trainer = self.trainer
        return (
            all(method.allows_lean(batch) for method in trainer.methods)
            and bool(getattr(trainer.args, "lean_steps", False))
            and trainer.model.training
            and trainer.accelerator.num_processes == 1
            and trainer.args.n_gpu <= 1
            and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
            and not (trainer.beta or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled)
            and "pixel_values" not in batch
            and not self._has_experts
        )

    def can_keep(self, batch: dict) -> bool:
        """Tells whether the loss will use the same rollouts and the same weights as a pass made now."""
        args = self.trainer.args
        return (
            self.applies(batch)
            and args.steps_per_generation == self.trainer.num_iterations == 1
            and not args.gradient_checkpointing
            and not args.neftune_noise_alpha
            and not self.is_noisy
        )

    @cached_property
    def _has_experts(self) -> bool:
        options = flat_options(self.trainer.accelerator.unwrap_model(self.trainer.model)).items()
        return any("expert" in name and bool(value) for name, value in options)

    @cached_property
    def is_noisy(self) -> bool:
        return is_noisy(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def keep(self, output: dict, log_probs: Tensor, entropies: Tensor, has_graph: Tensor) -> None:
        """Keeps a pass for the loss.

        output: TRL's batch; it gets each rollout's row in the pass, because TRL shuffles the rollouts before the loss.
        log_probs, entropies: (B, C). has_graph: (B,) bool.
        """
        self._kept_pass = KeptPass(log_probs, entropies, has_graph, self._rows_kept)
        rows = len(log_probs)
        output[ROW] = torch.arange(self._rows_kept, self._rows_kept + rows, device=log_probs.device)
        self._rows_kept += rows

    def while_sampling(self):
        self._kept_pass = None  # even if its loss was never computed
        return nullcontext()

    def around_loss(self, make, model, inputs):
        if not self.applies(inputs):
            return make(model, inputs)
        self._loss_inputs = inputs
        try:
            return make(model, inputs)
        finally:
            self._loss_inputs = self._kept_pass = None

    def around_pass(self, make, model, ids, mask, width, *args, **kwargs):
        batch = self._loss_inputs
        further = any(value is not None for name, value in kwargs.items() if not name.startswith("compute_"))
        if batch is None or args or further:  # further arguments have a row per rollout, which chunks would not cut
            return make(model, ids, mask, width, *args, **kwargs)
        learns, kept = learning_rows(batch), self._kept_rows(batch)
        known = torch.zeros_like(learns) if kept is None else kept.has_graph | ~learns
        parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        lengths = batch["completion_mask"].sum(1)
        for rows, with_gradient in chunks(lengths, learns, ~known, -(-len(lengths) // CHUNKS)):
            longest = max(1, int(lengths[rows].max()))
            wide = slice(ids.size(1) - width + longest)
            with torch.set_grad_enabled(with_gradient):
                part = (model, ids[rows, wide], mask[rows, wide], longest)
                passed = make(*part, **kwargs)
            parts.append((rows, passed[:2]))
        if kept is not None:
            rows = known.nonzero().squeeze(1)
            parts.append((rows, (kept.log_probs[rows], kept.entropies[rows])))
        return *in_order(parts, width), None

    def _kept_rows(self, batch: dict) -> KeptPass | None:
        """Returns the kept pass with its rows in the order of a micro-batch; None if it does not hold them."""
        kept = self._kept_pass
        if kept is None or ROW not in batch:
            return None
        places = batch[ROW] - kept.first
        if not ((places >= 0) & (places < len(kept.log_probs))).all():
            return None
        return KeptPass(kept.log_probs[places], kept.entropies[places], kept.has_graph[places], kept.first)


def learning_rows(batch: dict) -> Tensor:
    """Tells which rollouts have an advantage other than 0, -> (B,) bool.

    At least one row is True, because a loss needs a graph.
    """
    own = response_mask(batch)
    learns = (per_position(batch["advantages"]) * own).ne(0).any(1)  # includes NaN: the loss must see it
    if not learns.any():
        learns[own.sum(1).argmin()] = True
    return learns


def chunks(lengths: Tensor, learns: Tensor, wanted: Tensor, at_once: int) -> Iterator[tuple[Tensor, bool]]:
    """Cuts the wanted rollouts into chunks of at most `at_once` rollouts of similar length.

    lengths, learns, wanted: (B,). Yields (rows (b,), whether they learn). Chunks that learn come first: autocast reuses
    cast weights, and weights that were cast without gradient would be reused in the chunks that learn.
    """
    by_length = lengths.argsort()
    for with_gradient in (True, False):
        rows = by_length[(learns.eq(with_gradient) & wanted)[by_length]]
        if len(rows):
            yield from ((part, with_gradient) for part in rows.split(at_once))


def in_order(parts: list[tuple[Tensor, tuple[Tensor, ...]]], width: int) -> list[Tensor]:
    """Puts the rows of chunks back into the order of the batch, padded with 0 to `width`.

    parts: (rows (b,), several values (b, w)) of each chunk. -> as many values (B, width), through which gradients flow.
    """
    place = torch.cat([rows for rows, _ in parts]).argsort()
    no_row = torch.zeros(0, width, device=place.device)  # joining with it sets the width, and float32 at least
    return [joined([*values, no_row], dim=1)[place] for values in zip(*(values for _, values in parts), strict=True)]


def is_noisy(model: nn.Module) -> bool:
    """Tells whether two training forwards may differ, judging by the model's dropout modules and its options."""
    if any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    options = flat_options(model).items()
    return any(
        any(part in name for part in NOISY) and isinstance(value, float | int) and value > 0 for name, value in options
    )


def flat_options(model: Any) -> dict[str, Any]:
    """Returns the options of a model's configuration and of its adapters; nested options have dotted names."""
    adapters = {name: adapter.to_dict() for name, adapter in getattr(model, "peft_config", {}).items()}
    return flatten({"model": model.config.to_dict(), "adapters": adapters})
