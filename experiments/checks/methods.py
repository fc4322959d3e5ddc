"""Checks of the groups that may be off, METHODS of experiments/running/build.py. Imports no torch."""

from __future__ import annotations

import re

from omegaconf import DictConfig, OmegaConf

from experiments.checks.auxiliary import check_auxiliary
from experiments.checks.improvement import check_improvement
from experiments.checks.target import check_target
from experiments.running.build import METHODS, build, is_off
from experiments.running.command_line import CONF
from otb.errors import RunError
from otb.methods.token_weights import refuse_without_base

OF_THE_SCHEDULE = {  # keys of trainer that move the learning rate -> what leaves it alone, and what to use instead
    "lr_scheduler_type": (("constant",), "lr_scheduler_type=constant"),
    "lr_scheduler_kwargs": ((None, {}), "lr_scheduler_kwargs=null"),
    "warmup_steps": ((None, 0), "warmup_steps=0 and schedule.warmup"),
    "warmup_ratio": ((None, 0), "warmup_ratio=null and schedule.warmup"),
}


def check_methods(cfg: DictConfig) -> None:
    """Raises RunError for a method that cannot be built, or cannot work beside the rest of the configuration."""
    for group in METHODS:
        if is_off(cfg, group):
            _check_off(cfg, group)
            continue
        check_target(group, cfg[group])
        method = build(cfg, group)  # its constructor may refuse a value
        if group == "schedule":
            _check_schedule(cfg, method)
        if group == "token_weights" and method.reads_base:
            _check_base(cfg, method.signal)
        if group == "improvement":
            check_improvement(cfg, method)
        if group == "auxiliary":
            check_auxiliary(cfg, method)


def _check_off(cfg: DictConfig, group: str) -> None:
    for key, value in (cfg.get(group) or {}).items():
        if key != "_target_":
            choices = sorted(path.stem for path in (CONF / group).glob("*.yaml") if f"\n{key}:" in path.read_text())
            fix = f"Add {group}={choices[0]}" if choices else "Leave it out"
            raise RunError(f"{group}.{key}={value} is set, and the choice of {group} takes no options. {fix}.")


def _check_schedule(cfg: DictConfig, schedule) -> None:
    for key, (neutral, fix) in OF_THE_SCHEDULE.items():
        if (value := cfg.trainer.get(key, neutral[0])) not in neutral:
            raise RunError(
                f"trainer.{key}={value} and schedule=length_triggered would both set the learning rate. Use "
                f"trainer.{fix}, or schedule=constant."
            )
    longest = build(cfg, "task").max_completion_length
    if schedule.out_of_reach(longest):
        raise RunError(
            f"schedule.ratio={cfg.schedule.ratio} times a response of one token is not below "
            f"task.max_completion_length={longest}, so no surge can ever be seen. Use a smaller schedule.ratio, or a "
            "schedule.fixed_period."
        )


def _check_base(cfg: DictConfig, signal: str) -> None:
    try:
        refuse_without_base(signal, OmegaConf.to_container(cfg.model).get("lora"))
    except ValueError as error:
        raise RunError(re.sub(r"\blora\.(?=bias|init_lora)", "model.lora.", str(error))) from error
