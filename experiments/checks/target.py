"""Checks of what a group names by `_target_`, and of the arguments it is given. Imports no torch."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from omegaconf import DictConfig

from experiments.checks.values import check_choice, check_known
from experiments.running.fields import plain_types
from experiments.running.grpo_options import typed
from otb.errors import RunError
from otb.values import literal_choices

# type: what a value must be, and one to try
PLAIN = {
    bool: ("true or false", "false"),
    int: ("a whole number", "8"),
    float: ("a number", "0.1"),
    str: ("text", "TEXT"),
    type(None): ("null", "null"),
}


def check_target(group: str, node: DictConfig):
    """Returns the function or class that `node` names. Raises RunError for arguments, or values, that it does not take.

    Values are checked where the argument is annotated as Literal or with a plain type; its constructor may refuse
    others, such as numbers out of range.
    """
    name = str(node.get("_target_"))
    try:
        module, _, attribute = name.rpartition(".")
        target = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever importing a user's module raises
        raise RunError(f"{group}._target_={name} cannot be imported: {error}") from error
    parameters = inspect.signature(target).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return target
    arguments = [argument for argument in parameters if argument != "rollouts"]
    has = f"Its arguments: {', '.join(arguments)}." if arguments else "It takes none."
    for key, value in node.items():
        if key.startswith("_"):
            continue
        check_known(group, [key], arguments, f"argument of {name}", has)
        if choices := literal_choices(target, key):
            check_choice(f"{group}.{key}", value, choices)
        _check_type(f"{group}.{key}", value, plain_types(target, key), parameters[key].default)
    return target


def _check_type(key: str, value: Any, types: tuple[type, ...], default: Any) -> None:
    """Raises RunError unless the value is of one of the types; an int is a float too, and a bool is no int.

    types: () for any value. default: the argument's, to be tried.
    """
    accepted = {*types, int} if float in types else {*types}
    if not types or type(value) in accepted:
        return
    rule = " or ".join(PLAIN[kind][0] for kind in types)
    fix = f"{key}={typed(default if type(default) in types and default is not None else PLAIN[types[0]][1])}"
    if types[0] is str:
        fix = f"'{key}=\"{value if isinstance(value, int | float) else 'TEXT'}\"'"
    raise RunError(f"{key}={typed(value)} must be {rule}. Try {fix}.")
