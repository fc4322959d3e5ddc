"""Builds and checks the baseline and the groups that may be off, METHODS of running/build.py. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from experiments.checks.target import check_target
from experiments.running.build import METHODS, Run, build, is_off
from experiments.running.command_line import CONF
from otb.errors import RunError


def checked_baseline(cfg: DictConfig) -> Callable:
    """Returns the baseline. Raises RunError where it cannot be built of its arguments."""
    target = check_target("baseline", cfg.baseline)
    if inspect.isclass(target) == bool(cfg.baseline.get("_partial_")):
        what, fix = ("class", "false") if inspect.isclass(target) else ("function", "true")
        raise RunError(
            f"baseline._target_={cfg.baseline._target_} is a {what}; functions wait for their rollouts and classes are "
            f"built at once. Use baseline._partial_={fix}."
        )
    return build(cfg, "baseline")


def checked_methods(cfg: DictConfig) -> dict[str, Any]:
    """Returns what the groups name, as arguments of OTBTrainer. Raises RunError where one cannot be built."""
    methods = {}
    for group, argument in METHODS.items():
        if is_off(cfg, group):
            _check_off(cfg, group)
        else:
            check_target(group, cfg[group])
            methods[argument] = build(cfg, group)
    return methods


def _check_off(cfg: DictConfig, group: str) -> None:
    for key, value in (cfg.get(group) or {}).items():
        if key != "_target_":
            choices = sorted(path.stem for path in (CONF / group).glob("*.yaml") if f"\n{key}:" in path.read_text())
            fix = f"Add {group}={choices[0]}" if choices else "Leave it out"
            raise RunError(f"{group}.{key}={value} is set, and the choice of {group} takes no options. {fix}.")


def check_methods_act(run: Run) -> None:
    """Raises RunError for a method that this run would never see act."""
    cfg, methods = run.cfg, run.methods
    schedule, improvement, head = (methods.get(name) for name in ("lr_schedule", "improvement", "auxiliary"))
    if schedule and schedule.out_of_reach(longest := run.task.max_completion_length):
        raise RunError(
            f"schedule.ratio={schedule.ratio} times a response of one token is not below "
            f"task.max_completion_length={longest}, so no surge can ever be seen. Use a smaller schedule.ratio, or a "
            "schedule.fixed_period."
        )
    if improvement and cfg.steps <= improvement.steps_before:
        drawn = " and one to draw from" if improvement.steps_before > improvement.window else ""
        raise RunError(
            f"steps={cfg.steps} leaves no step for an improvement update: the first comes after improvement.window="
            f"{improvement.window} steps{drawn}. Use steps={4 * improvement.window} or more, or improvement=none."
        )
    if head and head.mode != "detach" and cfg.steps <= head.warmup:
        raise RunError(
            f"auxiliary.warmup={head.warmup} is not below steps={cfg.steps}, so the head would never act. Use a "
            "smaller auxiliary.warmup, or auxiliary.mode=detach."
        )
    if head and head.weights == "shipped" and (cfg.model.name == "tiny" or cfg.model.get("gguf_file")):
        what = "the tiny policy ships no head" if cfg.model.name == "tiny" else "none is read from a GGUF file"
        raise RunError(
            f"auxiliary.weights=shipped: {what}. Use auxiliary.weights=fresh, or a model that has one, such as "
            "model=hub model.name=XiaomiMiMo/MiMo-7B-RL."
        )
