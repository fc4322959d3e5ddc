"""Refuses options that are out of range before anything loads; its errors name the value, the rule and one to try.

Imports no torch, because the command line checks a configuration with it before the first heavy import.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A rule that a number must obey.

    Attributes:
        words: the rule in words, for the message.
        obeyed: returns whether a number obeys it.
        example: a number that obeys it, for the message, or its text.
        whole: whether it must be a whole number.
        optional: whether None is allowed too.
    """

    words: str
    obeyed: Callable[[Any], bool]
    example: float | str
    whole: bool = False
    optional: bool = False


def refuse_out_of_range(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raises ValueError for the first value that breaks its rule. `values` needs every name in `rules`."""
    for name, rule in rules.items():
        value = values[name]
        if value is None and rule.optional:
            continue
        is_number = isinstance(value, Integral if rule.whole else Real) and not isinstance(value, bool)
        if not is_number or not rule.obeyed(value):
            example = rule.example if isinstance(rule.example, str) else f"{rule.example:g}"
            raise ValueError(f"{name}={value} must be {rule.words}. Try {name}={example}.")


def refuse_unknown(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError for a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value} is not one of {', '.join(map(str, choices))}. Try {name}={choices[0]}.")


def refuse_arguments(function: Callable) -> None:
    """Raises ValueError for named arguments of a functools.partial that its function does not take.

    It reads the signature only, so a misspelt argument is found before the first batch. A function without a readable
    signature, such as a builtin, passes.
    """
    if not isinstance(function, partial):
        return
    try:
        taken = inspect.signature(function.func).parameters
    except (TypeError, ValueError):
        return
    name = getattr(function.func, "__name__", type(function.func).__name__)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for argument, value in function.keywords.items():
        if argument in taken:
            if choices := literal_choices(function.func, argument):
                refuse_unknown(argument, value, choices)
        elif not open_ended:
            own = ", ".join(list(taken)[1:]) or "none"
            raise ValueError(f"{argument}={value} is not an argument of {name}, which takes: {own}.")


def literal_choices(function: Callable, argument: str) -> tuple[Any, ...]:
    """Returns the values of an argument annotated as typing.Literal; () for any other annotation."""
    annotation = inspect.signature(function).parameters[argument].annotation
    if isinstance(annotation, str):  # from __future__ import annotations
        written = re.fullmatch(r"Literal\[(.+)\]", annotation)
        try:
            return ast.literal_eval(f"({written[1]},)") if written else ()
        except (SyntaxError, ValueError):  # a union with something else, or names of its module
            return ()
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def is_positive(value: float) -> bool:
    """Returns whether a number is above 0 and finite."""
    return 0 < value < math.inf
