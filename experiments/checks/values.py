"""Checks of single values, which the commands share. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from otb.errors import RunError

USUAL = {"group_size": 4}  # keys whose smallest value suits few configurations: most baselines compare rollouts


def check_whole_numbers(cfg: DictConfig, smallest: dict[str, int]) -> None:
    """Raises RunError unless each key is a whole number of at least its value in `smallest`."""
    for key, least in smallest.items():
        value = OmegaConf.select(cfg, key)
        if type(value) is not int or value < least:
            example = USUAL.get(key, max(least, 1))
            raise RunError(f"{key}={value} must be a whole number >= {least}. Try {key}={example}.")


def check_true_or_false(cfg: DictConfig, key: str) -> None:
    """Raises RunError unless the key is a bool."""
    if not isinstance(cfg[key], bool):
        raise RunError(f"{key}={cfg[key]} must be true or false. Try {key}=false.")


def check_positive(cfg: DictConfig, key: str, example: str) -> None:
    """Raises RunError unless the key is a positive number. example: a value to try."""
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RunError(f"{key}={value} must be a positive number. Try {key}={example}.")


def typed(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
