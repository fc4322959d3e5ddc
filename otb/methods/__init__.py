"""Defines `Method`, the protocol of everything besides the baseline, and `Step`, the batch it works on. Needs no TRL.

A method changes the loss, the data or the optimizer. `OTBTrainer` keeps its methods in one ordered list and calls each
hook on all of them in that order. For a hook that wraps a call, the first method is the innermost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from otb.refusals import Options
    from otb.rollouts import OwnTokens, RolloutGroups


@dataclass
class Step:
    """Holds a batch of rollouts between TRL's scoring and the loss. Each field is set as soon as it is known.

    This process's rollouts:
        output: the batch that TRL hands to its loss, by key: prompt_ids, prompt_mask (B, L), completion_ids,
            completion_mask (B, C), advantages (B,) or (B, C); where TRL has them old_per_token_logps,
            sampling_per_token_logps, importance_sampling_ratio, tool_mask (B, C).
        own: the own tokens that count.
        log_probs: (B, C), under the policy that sampled; None if no pass was made.
        signals, factors: (B, T) and (B, T or 1), of token weights; None if not used.
    The rollouts of all processes:
        rollouts, baseline: the prompt groups, and what the baseline returned for them.
        advantages: (P, G, T or 1).
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
    """Changes the loss, the data or the optimizer at some moments of a step.

    The hooks are listed in the order of a step. By default each of them changes nothing. A hook may ask `trainer` for
    `args`, `model`, `state` and `accelerator`, and call

        record(metrics): logs them with the step, by the names in otb/records/metric_names.py
        gathered(rows): (B, ...) of this process -> (P, G, ...) of all; in_groups(rows): (P * G, ...) -> (P, G, ...)
        summed_rewards(): (P * G,), NaN where unscored; causal_model(): the model with the LM head, unwrapped
        passed(model, ids, mask, width): one pass through the methods; add_seconds(part, seconds): its time
    """

    trainer: Any  # the OTBTrainer, from `attach` on

    def refuse(self, options: Options) -> None:
        """Raises ValueError for options that the method cannot work with, before the model is loaded."""

    def attach(self, trainer: Any) -> None:
        """Receives the trainer, whose model is loaded. Raises ValueError if the method cannot work with this model."""
        self.trainer = trainer

    # ---- new rollouts

    def while_sampling(self) -> AbstractContextManager:
        """Returns a context that surrounds sampling and scoring of a training batch."""
        return nullcontext()

    def around_generation(self, make: Callable, prompts: list) -> tuple:
        """Samples the responses to prompts with `make(prompts)`, in evaluations too. Returns what `make` returns."""
        return make(prompts)

    def around_turn(self, make: Callable, prompt_ids: list[list[int]], *args, **kwargs) -> tuple:
        """Samples one turn of every unfinished rollout with `make`. -> token ids, and log-probs or None."""
        return make(prompt_ids, *args, **kwargs)

    def around_reply(self, make: Callable, messages: list[dict]) -> list[int]:
        """Turns the replies to one rollout's tool calls into tokens with `make`."""
        return make(messages)

    def begin(self, output: dict) -> None:
        """Runs after TRL has scored the batch; a method can remove rollouts from the loss here."""

    def measured(self, step: Step) -> None:
        """Runs after the baseline's inputs have been measured."""

    def weighed(self, step: Step) -> None:
        """Runs after the advantages have been computed; a method can replace them here."""

    def finish(self, step: Step) -> None:
        """Runs after the advantages have been written into the batch."""

    def batches(self, batches: list[dict]) -> list[dict]:
        """Runs after TRL has cut the batch into micro-batches; returns the micro-batches to train on."""
        return batches

    # ---- a micro-batch

    def before_micro_batch(self) -> None:
        """Runs before the forward and the backward of a micro-batch."""

    def allows_lean(self, batch: dict) -> bool:
        """Tells whether the loss may skip the backward of rollouts whose advantages are all 0."""
        return True

    def around_pass(self, make: Callable, model: Any, ids: Tensor, mask: Tensor, width: int, *args, **kwargs) -> tuple:
        """Computes log-probs of the last `width` positions with one call of `make`, or several."""
        return make(model, ids, mask, width, *args, **kwargs)

    def around_loss(self, make: Callable, model: Any, inputs: dict) -> Tensor:
        """Computes the loss of the micro-batch with `make(model, inputs)`."""
        return make(model, inputs)

    def after_micro_batch(self, loss: Tensor) -> None:
        """Runs after the gradient of a micro-batch has been added. loss: detached, divided by their number."""

    # ---- the optimizer

    def gradient(self, norm: Any) -> Any:
        """Runs before an optimizer step. norm: of its gradient.

        Returns the norm, or a value that is not finite: RunTrainer stops on such a value.
        """
        return norm

    def add_to(self, optimizer: Any, weight_decay: float) -> None:
        """Adds the method's parameters to a new optimizer."""

    def scheduler(self, optimizer: Any) -> Any:
        """Returns a scheduler for the learning rate, or None to use TRL's."""
        return None

    # ---- checkpoints

    def learners(self) -> dict[str, Any]:
        """Returns objects whose state is the same in all processes: file in a checkpoint -> object with state_dict."""
        return {}

    def save(self, folder: str) -> None:
        """Saves state that differs between processes into a checkpoint."""

    def load(self, folder: str) -> None:
        """Restores what `save` wrote. Raises ValueError if the method cannot resume from this checkpoint."""
