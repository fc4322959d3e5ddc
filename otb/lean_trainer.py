"""LeanTrainer: a GRPOTrainer whose loss makes no forward and no backward that its gradient does not need.

OTBTrainer is one; with `lean_steps=False` nothing here does anything, and TRL's one forward over the padded batch is
the loss's. What it saves, each of it without a change of the gradient beyond rounding:

    padding         rollouts of similar length stand together, and each chunk is as wide as its longest
    backwards       a rollout whose advantages are all 0 has no gradient: its forward, for the metrics, keeps no graph
    a forward       where a pass before the loss had the weights of the loss (score norms), the loss takes this pass

Several processes would have to make equally many forwards, and several terms of TRL's loss read more than advantages
times log-probabilities: there all passes are TRL's (`_is_lean`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from otb.improving_trainer import ImprovingTrainer
from otb.loss_inputs import per_position, response_mask
from otb.rollouts import joined

ROW = "kept_row"  # the key of a batch under which each rollout's place in the kept pass stands
CHUNKS = 4  # at most, of the rollouts of a pass, by length; more would save little padding and make its matrices small


class KeptPass(NamedTuple):
    """A pass over a generation that its loss can take. Rows of log_probs and entropies (B, C) are in its own order.

    has_graph (B,): whether a gradient can flow back through the row's log_probs.
    """

    log_probs: Tensor
    entropies: Tensor
    has_graph: Tensor


class LeanTrainer(ImprovingTrainer):
    """A GRPOTrainer that leaves out of the passes of its loss what has no gradient."""

    _mtp: Any

    def __init__(self, *args, **kwargs):
        self._kept_pass: KeptPass | None = None  # of the last generation, until its loss
        self._loss_inputs: dict | None = None  # while a lean loss is computed
        super().__init__(*args, **kwargs)

    def _is_lean(self, batch: dict) -> bool:
        """Tells whether the loss of these rollouts is a sum over advantages times what the log-probs say."""
        return (
            bool(getattr(self.args, "lean_steps", False))
            and self.model.training
            and self.accelerator.num_processes == 1
            and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
            and not (self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled)
            and self.improvement is None
            and self._mtp is None
            and "pixel_values" not in batch
        )

    def _can_keep_pass(self, batch: dict) -> bool:
        """Tells whether the loss will be that of the whole generation, by the weights and in the mode of a pass now."""
        return (
            self._is_lean(batch)
            and self.args.steps_per_generation == self.num_iterations == 1
            and not self.args.gradient_checkpointing
            and not has_dropout(self.model)
        )

    def _keep_pass(self, output: dict, kept: KeptPass) -> None:
        """Keeps a pass for the loss. output: what TRL will shuffle and hand to it."""
        self._kept_pass = kept
        output[ROW] = torch.arange(len(kept.log_probs), device=kept.log_probs.device)

    def _compute_loss(self, model, inputs):
        if not self._is_lean(inputs):
            return super()._compute_loss(model, inputs)
        self._loss_inputs = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = self._kept_pass = None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        batch = self._loss_inputs
        if batch is None:
            part = (model, input_ids, attention_mask, logits_to_keep)
            return super()._get_per_token_logps_and_entropies(*part, *args, **kwargs)
        kept, learns = self._kept_pass, learning_rows(batch)
        known = torch.zeros_like(learns) if kept is None else kept.has_graph[batch[ROW]] | ~learns
        parts = []
        lengths = batch["completion_mask"].sum(1)
        for rows, with_gradient in chunks(lengths, learns, ~known, CHUNKS):
            width = max(1, int(lengths[rows].max()))
            wide = slice(input_ids.size(1) - logits_to_keep + width)
            with torch.set_grad_enabled(with_gradient):
                part = (model, input_ids[rows, wide], attention_mask[rows, wide], width)
                passed = super()._get_per_token_logps_and_entropies(*part, *args, **kwargs)
            parts.append((rows, passed[:2]))
        if kept is not None:
            rows = known.nonzero().squeeze(1)
            parts.append((rows, (kept.log_probs[batch[ROW][rows]], kept.entropies[batch[ROW][rows]])))
        return *in_order(parts, logits_to_keep), None


def learning_rows(batch: dict) -> Tensor:
    """Tells of which rollouts an advantage is not 0, (B,) bool; of at least one, because a loss needs a graph."""
    own = response_mask(batch)
    learns = (per_position(batch["advantages"]) * own).ne(0).any(1)  # NaN learns, too: the loss must see it
    if not learns.any():
        learns[own.sum(1).argmin()] = True
    return learns


def chunks(lengths: Tensor, learns: Tensor, wanted: Tensor, most: int) -> Iterator[tuple[Tensor, bool]]:
    """Cuts the wanted rollouts into chunks of similar length: (rows, whether they learn).

    lengths, learns, wanted: (B,). most: chunks of as many rows as a batch of all rollouts would be cut into.
    """
    by_length = lengths.argsort()
    for with_gradient in (True, False):
        rows = by_length[(learns.eq(with_gradient) & wanted)[by_length]]
        if len(rows):
            yield from ((part, with_gradient) for part in rows.split(-(-len(lengths) // most)))


def in_order(parts: list[tuple[Tensor, tuple[Tensor, ...]]], width: int) -> list[Tensor]:
    """Puts the rows of chunks back into the order of the batch. Positions behind a chunk's own width are 0.

    parts: (rows (b,), several values (b, w)) of each chunk. -> as many values (B, width), through which gradients flow.
    """
    place = torch.cat([rows for rows, _ in parts]).argsort()
    no_row = torch.zeros(0, width, device=place.device)
    return [joined([*values, no_row], dim=1)[place] for values in zip(*(values for _, values in parts), strict=True)]


def has_dropout(model: torch.nn.Module) -> bool:
    """Tells whether training draws a dropout mask anywhere, as far as modules and configuration say."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    options: dict = cast(Any, model).config.to_dict()
    return any("drop" in name and isinstance(value, float | int) and value > 0 for name, value in options.items())
