"""Lowers the learning rate when responses grow long: length-triggered decay (arXiv 2602.01826).

`OTBTrainer(lr_schedule=...)` gives the schedule to torch's LambdaLR. LambdaLR saves the attributes of a callable object
in its own state, so every checkpoint holds them. A run builds the schedule from `schedule=` (conf/schedule). Importing
this file imports no torch. docs/neighbours/length_triggered.md lists the sources, and our choices where they disagree.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

from otb.methods import Method, Step
from otb.refusals import Code, Options, Taken
from otb.values import Rule, is_positive, refuse_out_of_range, refuse_unknown

RULES = {
    "warmup": Rule("a whole number >= 0", lambda value: value >= 0, 10, whole=True),
    "ratio": Rule("a number > 1", lambda value: 1 < value < math.inf, 3),
    "baseline_steps": Rule("a whole number >= 1", lambda value: value >= 1, 50, whole=True),
    "period_factor": Rule("a positive number", is_positive, 1.8),
    "factor": Rule("a number between 0 and 1, exclusive", lambda value: 0 < value < 1, 0.5),
    "floor": Rule("a number from 0 to 1", lambda value: 0 <= value <= 1, 0.1),
    "fixed_period": Rule("a whole number >= 1, or null", lambda value: value >= 1, 100, whole=True, optional=True),
}

LEAVE_THE_RATE: dict[str, tuple] = {  # options that change the learning rate -> values that do not
    "lr_scheduler_type": ("constant",),
    "lr_scheduler_kwargs": (None, {}),
    "warmup_steps": (0,),
    "warmup_ratio": (None, 0),
}


class LengthTriggeredDecay:
    """Multiplies the learning rate by `factor` every P steps once responses have become much longer.

    At each step the factor is

        w * max(floor, factor ^ floor(max(0, step - t0) / P)), P = period_factor * surge_step

    with w the warm-up and t0 the step from which periods count. Long before a run collapses from the mismatch between
    sampler and trainer, its responses grow longer; smaller updates keep the mismatch down (arXiv 2602.01826). `step` is
    the number of finished optimizer steps, as LambdaLR counts; this step's row in metrics.jsonl has number step + 1.

    Args:
        warmup: Steps over which w rises linearly to 1.
        ratio: The surge is the first batch whose mean response length exceeds `ratio` times the initial length.
        baseline_steps: Number of batches at the start; their mean response length is the initial length. None of them
            can be the surge.
        period_factor: Ratio of P to the step of the surge.
        factor: Each decay multiplies the learning rate by it.
        floor: The smallest share of the learning rate that remains.
        anchor: t0 is the end of the warm-up ("start") or the surge ("surge").
        fixed_period: P, if an earlier run has shown it; with anchor "start" the decay then needs no surge. None: the
            surge determines P.

    The options are part of the state: a resumed run keeps the options that it began with.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        warmup: int = 10,
        ratio: float = 3.0,
        baseline_steps: int = 50,
        period_factor: float = 1.8,
        factor: float = 0.5,
        floor: float = 0.1,
        anchor: Literal["start", "surge"] = "start",
        fixed_period: int | None = None,
    ):
        self.warmup, self.ratio, self.baseline_steps = warmup, ratio, baseline_steps
        self.period_factor, self.factor, self.floor = period_factor, factor, floor
        self.anchor, self.fixed_period = anchor, fixed_period
        self.lengths: list[float] = []  # mean response lengths of the first batches
        self.baseline: float | None = None  # the initial length: their mean, in own tokens
        self.surge_step: int | None = None
        refuse_out_of_range(vars(self), RULES)
        refuse_unknown("anchor", anchor, ("start", "surge"))

    def refuse(self, options: Options) -> None:
        """Raises ValueError if something else would also change the learning rate."""
        own = options.key("lr_schedule")
        rule, off = f"and {own} would both set the learning rate; {own}.warmup is its own", ("lr_schedule", None)
        if options.optimizers is not None and options.optimizers[1] is not None:
            given = Code(f"(..., {type(options.optimizers[1]).__name__})")
            raise options.refusal("optimizers", rule, "no scheduler in optimizers", off, value=given)
        options.refuse_others((Taken(option, values, rule) for option, values in LEAVE_THE_RATE.items()), off)

    def observe(self, step: int, mean_length: float) -> None:
        """Takes the mean response length of a batch, in own tokens, over all processes.

        step: the number of optimizer steps finished before the batch was sampled.
        """
        if self.baseline is None:
            self.lengths.append(mean_length)
            if len(self.lengths) == self.baseline_steps:
                self.baseline = sum(self.lengths) / self.baseline_steps
        elif self.surge_step is None and mean_length > self.ratio * self.baseline:
            self.surge_step = step

    def __call__(self, step: int) -> float:
        """Returns the factor of the learning rate at a step."""
        warm = min(1.0, (step + 1) / self.warmup) if step < self.warmup else 1.0
        begun = self.warmup if self.anchor == "start" else self.surge_step
        if (period := self.period) is None or begun is None:
            return warm
        return warm * max(self.floor, self.factor ** (max(0, step - begun) // period))

    @property
    def period(self) -> int | None:
        """The number of steps between two decays; None before the surge, unless `fixed_period` is set."""
        if self.fixed_period is not None or self.surge_step is None:
            return self.fixed_period
        return max(1, int(self.period_factor * self.surge_step))

    def out_of_reach(self, longest: int) -> bool:
        """Tells whether the awaited surge can never come, because responses have at most `longest` own tokens."""
        waits = self.fixed_period is None or self.anchor == "surge"
        known = self.baseline if self.baseline is not None else 1.0  # a response has at least one token
        return waits and self.surge_step is None and known * self.ratio >= longest

    def metrics(self) -> dict[str, float]:
        """Returns the initial length and the step of the surge as metrics, each once it is known."""
        found = {"length_baseline": self.baseline, "length_surge_step": self.surge_step}
        return {name: value for name, value in found.items() if value is not None}


class FollowedLengths(Method):
    """Tells a schedule the mean response length of each batch, and warns if no surge can be seen."""

    def __init__(self, schedule: LengthTriggeredDecay):
        self.schedule = schedule

    def scheduler(self, optimizer):
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self.schedule)

    def finish(self, step: Step) -> None:
        schedule, trainer = self.schedule, self.trainer
        known = schedule.baseline is not None
        schedule.observe(trainer.state.global_step, trainer._metrics["train"]["response_length_mean"][-1])
        trainer.record(schedule.metrics())
        if known or schedule.baseline is None or not trainer.accelerator.is_main_process:
            return
        if schedule.out_of_reach(trainer.max_completion_length):
            warnings.warn(
                f"responses begin with {schedule.baseline:.1f} tokens, and {schedule.ratio:g} times as many are not "
                f"below max_completion_length={trainer.max_completion_length}: no surge can be seen, and the learning "
                "rate stays. Use a smaller ratio, or a fixed_period.",
                stacklevel=2,
            )
