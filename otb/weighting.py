"""Token weights and the length-triggered schedule as Methods: what they do at a moment of the step."""

from __future__ import annotations

import warnings

from otb.method import Method, Step
from otb.metrics import token_weight_metrics
from otb.schedules import LengthTriggeredDecay
from otb.token_weights import TokenWeights


class WeightedAdvantages(Method):
    """Multiplies the advantages by the factors that `Passes` measured, and lets the weights learn."""

    def __init__(self, weights: TokenWeights):
        self.weights = weights

    def weighed(self, step: Step) -> None:
        factors = self.trainer._gathered(step.factors)
        signals = None if step.signals is None else self.trainer._gathered(step.signals)
        own = step.rollouts.reached(factors.shape[-1])
        self.trainer._log(token_weight_metrics(signals, factors, own))
        if signals is not None:
            self.weights.update(signals, own)
        step.advantages = step.advantages * factors


class FollowedLengths(Method):
    """Tells a schedule how long responses are."""

    def __init__(self, schedule: LengthTriggeredDecay):
        self.schedule = schedule

    def finish(self, step: Step) -> None:
        schedule, trainer = self.schedule, self.trainer
        known = schedule.baseline is not None
        schedule.observe(trainer.state.global_step, trainer._metrics["train"]["response_length_mean"][-1])
        trainer._log(schedule.metrics())
        if known or schedule.baseline is None or not trainer.accelerator.is_main_process:
            return
        if schedule.out_of_reach(trainer.max_completion_length):
            warnings.warn(
                f"responses begin with {schedule.baseline:.1f} tokens, and {schedule.ratio:g} times as many are not "
                f"below max_completion_length={trainer.max_completion_length}: no surge can be seen, and the learning "
                "rate stays. Use a smaller ratio, or a fixed_period.",
                stacklevel=2,
            )
