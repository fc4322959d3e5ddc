"""Checks of single values, which the commands share. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.running.command_line import near_miss
from otb.errors import RunError
from otb.values import Rule, is_positive, refuse_out_of_range


@contextmanager
def told_to_the_user(of: str = "") -> Iterator[None]:
    """Raises a ValueError again as a RunError, which is shown without a traceback. of: what the message begins with."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"{of}{error}") from error


def whole_number(least: int, example: int | str | None = None, null: str = "") -> Rule:
    """Returns the rule of a whole number. null: what null means, where it is allowed."""
    words = f"a whole number >= {least}" + (f", or {null}" if null else "")
    example = max(least, 1) if example is None else example
    return Rule(words, lambda value: value >= least, example, whole=True, optional=bool(null))


def check_numbers(cfg: DictConfig, rules: Mapping[str, Rule]) -> None:
    """Raises RunError for the first key whose value breaks its rule."""
    with told_to_the_user():
        refuse_out_of_range({key: OmegaConf.select(cfg, key) for key in rules}, rules)


def check_known(group: str, keys: Iterable, known: Collection, what: str, has: str | None = None) -> None:
    """Raises RunError for a key that is not known. what: a known one is. has: a sentence on them; None lists them."""
    for key in keys:
        if key not in known:
            has = f"Keys: {', '.join(sorted(known))}." if has is None else has
            raise RunError(f"{group}.{key} is no {what}.{near_miss(key, known)} {has}".rstrip())


def check_choice(key: str, value: Any, choices: Collection, further: str = "") -> None:
    """Raises RunError for a value that is none of the choices. further: what else may be said of them."""
    if value not in choices:
        raise RunError(f"{key}={value} is not one of {', '.join(choices)}.{near_miss(value, choices)}{further}")


def check_true_or_false(cfg: DictConfig, *keys: str) -> None:
    """Raises RunError unless each key is a bool."""
    for key in keys:
        if not isinstance(value := OmegaConf.select(cfg, key), bool):
            raise RunError(f"{key}={value} must be true or false. Try {key}=false.")


def check_positive(cfg: DictConfig, key: str, example: str) -> None:
    """Raises RunError unless the key is a positive number. example: a value to try."""
    with told_to_the_user():
        refuse_out_of_range({key: cfg[key]}, {key: Rule("a positive number", is_positive, example)})
