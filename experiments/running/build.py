"""Builds what a configuration names by `_target_`: task, baseline, methods, sandbox. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from otb.errors import RunError, first_line
from otb.sandbox import Sandbox, SandboxFailure
from otb.tasks import Task
from otb.training.options import Batches

# Groups that may be off (`_target_: null`) -> the argument of OTBTrainer that takes what they name.
METHODS = {
    "auxiliary": "auxiliary",
    "improvement": "improvement",
    "schedule": "lr_schedule",
    "token_weights": "token_weights",
}


@dataclass(frozen=True)
class Run:
    """A checked configuration with what follows from it. experiments/checks makes it once; the command hands it on.

    Args:
        sandbox: of a task with tools, not yet opened; else None.
        held_out: tasks of `evaluation.tasks` by name.
        methods: what the groups of METHODS name, as arguments of OTBTrainer; nothing for one that is off.
        processes: that train together.
        step: how they divide the rollouts of a step.
    """

    cfg: DictConfig
    task: Task
    sandbox: Sandbox | None
    held_out: Mapping[str, Task]
    baseline: Callable
    methods: Mapping[str, Any]
    processes: int
    step: Batches


def is_tiny(model: DictConfig) -> bool:
    """Tells whether the group `model` has the keys of model=tiny, whatever its model.name."""
    return "warm_start" in model  # in conf/model/tiny.yaml alone


def unless_tiny(text: str, *, _root_) -> str | None:
    """Returns the text where the configuration has another model than `model=tiny`; yamls call it ${unless_tiny:...}.

    A configuration without a model gets None.
    """
    model = _root_.get("model")
    return None if model is None or is_tiny(model) else text


OmegaConf.register_new_resolver("unless_tiny", unless_tiny, replace=True)


def build(cfg: DictConfig, group: str):
    """Returns the task, baseline or sandbox that `cfg` names.

    Raises RunError with the text of what its constructor raises, its arguments named as they are typed.
    """
    try:
        return instantiate(cfg[group], _convert_="object")
    except InstantiationException as error:
        cause = error.__cause__ or error
        reason = first_line(cause)
        if not isinstance(cause, ValueError):
            raise RunError(f"{group}: {type(cause).__name__}: {reason}") from error
        keys = "|".join(re.escape(str(key)) for key in cfg[group])
        raise RunError(re.sub(rf"(?<![\w.])({keys})=", rf"{group}.\1=", reason)) from error


def is_off(cfg: DictConfig, group: str) -> bool:
    """Tells whether a group of METHODS has the choice that does nothing."""
    return (cfg.get(group) or {}).get("_target_") is None


def has_reference(cfg: DictConfig) -> bool:
    """Tells whether TRL loads the policy a second time, as what `trainer.beta` keeps it near. LoRA has it beneath."""
    return bool(OmegaConf.select(cfg, "trainer.beta")) and not OmegaConf.select(cfg, "model.lora")


@contextmanager
def opened(sandbox: Sandbox | None) -> Iterator[None]:
    """Tries the sandbox of a task with tools, and closes it at the end; None: nothing. Raises RunError."""
    with nullcontext() if sandbox is None else closing(sandbox):
        try:
            if sandbox is not None:
                sandbox.check()
        except SandboxFailure as error:
            raise RunError(f"sandbox: {error}") from error
        yield
