"""The protocol of a method beside the baseline, and what a training step knows. Neither needs TRL.

A method changes the loss, the data or the optimizer. `OTBTrainer` keeps its methods in one ordered list and calls each
hook for all of them in that order. Where a hook surrounds something, the first method is the innermost.
"""

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
    """A batch of rollouts from TRL's scoring to the loss. Each field is filled in as soon as it is known.

    output: what TRL hands to its loss. own: the own tokens of this process that count. log_probs (B, C): of the policy
    that sampled; None where no pass was made. signals (B, T), factors (B, T or 1): of token weights. rollouts,
    baseline, advantages (P, G, T or 1): of all processes.
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

    trainer: Any  # the OTBTrainer, from `attach` on

    def attach(self, trainer: Any) -> None:
        """Gets the trainer, whose model is loaded. Raises ValueError for what only the model shows."""
        self.trainer = trainer

    # ---- new rollouts

    def while_sampling(self) -> AbstractContextManager:
        """Surrounds sampling and scoring of a training batch."""
        return nullcontext()

    def around_generation(self, make: Callable, prompts: list) -> tuple:
        """Samples the responses to prompts by `make(prompts)`, in evaluations as well; returns what TRL's does."""
        return make(prompts)

    def around_turn(self, make: Callable, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        """Samples one turn of every unfinished rollout by `make`. -> token ids, and log-probs or None."""
        return make(prompt_ids, *args, **kwargs)

    def around_reply(self, make: Callable, messages: list[dict]) -> list[int]:
        """Turns the replies to one rollout's tool calls into tokens by `make`."""
        return make(messages)

    def begin(self, output: dict) -> None:
        """TRL has scored the batch; this is where rollouts are taken out of the loss."""

    def measured(self, step: Step) -> None:
        """The baseline's inputs have been measured."""

    def weighed(self, step: Step) -> None:
        """The advantages are known and may be replaced."""

    def finish(self, step: Step) -> None:
        """The advantages are in the batch."""

    def batches(self, batches: list[dict]) -> list[dict]:
        """TRL has cut the batch into micro-batches; returns those to train on."""
        return batches

    # ---- a micro-batch

    def before_micro_batch(self) -> None:
        """Its forward and backward pass follow."""

    def allows_lean(self, batch: dict) -> bool:
        """Tells whether the loss may leave out rollouts whose advantages are all 0."""
        return True

    def around_pass(self, make: Callable, model: Any, ids: Tensor, mask: Tensor, width: int, *args, **kwargs) -> tuple:
        """Computes log-probs of the last `width` positions by one call of `make`, or by several."""
        return make(model, ids, mask, width, *args, **kwargs)

    def around_loss(self, make: Callable, model: Any, inputs: dict) -> Tensor:
        """Computes the loss of the micro-batch by `make(model, inputs)`."""
        return make(model, inputs)

    def after_micro_batch(self, loss: Tensor) -> None:
        """Its gradient has been added. loss: detached, divided by the number of micro-batches."""

    # ---- the optimizer

    def gradient(self, norm: Any) -> Any:
        """An optimizer step follows. norm: of its gradient. Returns it, or a value that is not finite to stop a run."""
        return norm

    def add_to(self, optimizer: Any, weight_decay: float) -> None:
        """Adds the method's own parameters to a new optimizer."""

    def scheduler(self, optimizer: Any) -> Any:
        """Returns a scheduler of the learning rate, or None to leave it to TRL."""
        return None

    # ---- checkpoints

    def learners(self) -> dict[str, Any]:
        """Returns what learns, the same in all processes: file in a checkpoint -> object with state_dict."""
        return {}

    def save(self, folder: str) -> None:
        """A checkpoint is written; this is for state that differs between processes."""

    def load(self, folder: str) -> None:
        """Training resumes from a checkpoint. Raises ValueError where the method cannot."""
