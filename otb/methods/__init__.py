"""The protocol of a method beside the baseline, and what a step knows. OTBTrainer calls both; neither imports TRL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import OwnTokens, RolloutGroups


@dataclass
class Step:
    """A batch of rollouts on its way from TRL's scoring to its loss; tensors are of this process unless it says so.

    output: what TRL hands on. own: its own tokens that count. log_probs (B, C): of the policy that sampled, None where
    no pass was made. signals (B, T), factors (B, T or 1): of token weights. rollouts, baseline, advantages (P, G, T or
    1): of all processes.
    """

    output: dict
    own: OwnTokens
    log_probs: Tensor | None = None
    signals: Tensor | None = None
    factors: Tensor | None = None
    rollouts: RolloutGroups = field(default=None)  # type: ignore[assignment]
    baseline: Any = None
    advantages: Tensor = field(default=None)  # type: ignore[assignment]


class Method:
    """Something beside the baseline. Each hook is a moment of the step, in this order, and does nothing by default."""

    trainer: Any

    def attach(self, trainer: Any) -> None:
        """The model is there."""
        self.trainer = trainer

    def while_sampling(self) -> AbstractContextManager:
        """Surrounds TRL's sampling and scoring of a batch."""
        return nullcontext()

    def begin(self, output: dict) -> None:
        """TRL has scored the batch; rows may be taken out of it."""

    def measured(self, step: Step) -> None:
        """What the baseline needs has been measured."""

    def weighed(self, step: Step) -> None:
        """The advantages are made and may be replaced."""

    def finish(self, step: Step) -> None:
        """The advantages stand in the batch."""

    def batches(self, batches: list[dict]) -> list[dict]:
        """TRL has cut a new batch into micro-batches."""
        return batches

    def before_micro_batch(self) -> None:
        """A forward and backward pass follow."""

    def allows_lean(self, batch: dict) -> bool:
        """Whether the loss may leave out rollouts whose advantages are all 0."""
        return True

    def around_pass(self, make: Callable, model: Any, ids: Tensor, mask: Tensor, width: int, *args, **kwargs) -> tuple:
        """Makes a pass for log-probs by `make`, or by more than one."""
        return make(model, ids, mask, width, *args, **kwargs)

    def around_loss(self, make: Callable, model: Any, inputs: dict) -> Tensor:
        """Makes the loss of a micro-batch by `make`."""
        return make(model, inputs)

    def after_micro_batch(self) -> None:
        """Its gradient has been added."""

    def gradient(self, norm: Any) -> Any:
        """An optimizer step follows. norm: of its gradient. Returns it, or one that is not finite to stop the run."""
        return norm

    def add_to(self, optimizer: Any, weight_decay: float) -> None:
        """Adds parameters of its own."""

    def save(self, folder: str) -> None:
        """A checkpoint is written."""

    def load(self, folder: str) -> None:
        """It goes on from one. Raises ValueError where it cannot."""
