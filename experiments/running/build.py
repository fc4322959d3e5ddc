"""Builds what a configuration names by `_target_`: task, baseline, sandbox. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from otb.errors import RunError, first_line
from otb.sandbox import Sandbox, SandboxFailure

# Groups that may be off (`_target_: null`) -> the argument of OTBTrainer that takes what they name.
METHODS = {
    "auxiliary": "auxiliary",
    "improvement": "improvement",
    "schedule": "lr_schedule",
    "token_weights": "token_weights",
}


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


def methods(cfg: DictConfig) -> dict[str, Any]:
    """Returns what the groups of METHODS name, as arguments of OTBTrainer; None for one that is off."""
    built = {argument: None if is_off(cfg, group) else build(cfg, group) for group, argument in METHODS.items()}
    return {argument: method for argument, method in built.items() if method is not None}


def is_off(cfg: DictConfig, group: str) -> bool:
    """Tells whether a group of METHODS has the choice that does nothing."""
    return (cfg.get(group) or {}).get("_target_") is None


def uses_tools(cfg: DictConfig) -> bool:
    """Tells whether the task of a configuration needs a sandbox."""
    return build(cfg, "task").environment is not None


def has_reference(cfg: DictConfig) -> bool:
    """Tells whether TRL loads the policy a second time, as what `trainer.beta` keeps it near. LoRA has it beneath."""
    return bool(OmegaConf.select(cfg, "trainer.beta")) and not OmegaConf.select(cfg, "model.lora")


@contextmanager
def opened_sandbox(cfg: DictConfig) -> Iterator[Sandbox | None]:
    """Yields the sandbox of a task with tools, which it tries first; None for another task. Raises RunError."""
    if not uses_tools(cfg):
        yield None
        return
    with closing(build(cfg, "sandbox")) as sandbox:
        try:
            sandbox.check()
        except SandboxFailure as error:
            raise RunError(f"sandbox: {error}") from error
        yield sandbox
