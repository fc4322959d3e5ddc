"""Checks of the group `schedule`. Imports no torch."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.build import build, is_off
from experiments.checks.target import check_target
from otb.errors import RunError

OF_THE_SCHEDULE = {  # keys of trainer that move the learning rate -> what leaves it alone, and what to use instead
    "lr_scheduler_type": (("constant",), "lr_scheduler_type=constant"),
    "lr_scheduler_kwargs": ((None, {}), "lr_scheduler_kwargs=null"),
    "warmup_steps": ((None, 0), "warmup_steps=0 and schedule.warmup"),
    "warmup_ratio": ((None, 0), "warmup_ratio=null and schedule.warmup"),
}


def check_schedule(cfg: DictConfig) -> None:
    """Raises RunError for a schedule that cannot be, or that something else would move as well."""
    if is_off(cfg, "schedule"):
        return
    check_target("schedule", cfg.schedule)
    schedule = build(cfg, "schedule")  # its constructor may refuse a value
    for key, (neutral, fix) in OF_THE_SCHEDULE.items():
        if (value := cfg.trainer.get(key, neutral[0])) not in neutral:
            raise RunError(
                f"trainer.{key}={value} and schedule=length_triggered would both set the learning rate. Use "
                f"trainer.{fix}, or schedule=constant."
            )
    longest = build(cfg, "task").max_completion_length
    if hasattr(schedule, "out_of_reach") and schedule.out_of_reach(longest):
        raise RunError(
            f"schedule.ratio={cfg.schedule.ratio} times a response of one token is not below "
            f"task.max_completion_length={longest}, so no surge can ever be seen. Use a smaller schedule.ratio, or a "
            "schedule.fixed_period."
        )
