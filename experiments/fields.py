"""What classes and functions accept, by their signatures and source files: importing TRL or peft would import torch."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path

PLAIN = {kind.__name__: kind for kind in (bool, int, float, str)} | {"None": type(None)}


def plain_types(function, argument: str) -> tuple[type, ...]:
    """Returns the types of an argument annotated as bool, int, float or str, also `float | None`; () for any other."""
    annotation = inspect.formatannotation(inspect.signature(function).parameters[argument].annotation)
    names = annotation.strip("'").split(" | ")  # in quotes: from __future__ import annotations
    return tuple(PLAIN[name] for name in names) if all(name in PLAIN for name in names) and names != ["None"] else ()


@cache
def trainer_fields() -> frozenset[str]:
    """Returns the name of every option of trl.GRPOConfig."""
    modules = {
        "trl.trainer.grpo_config": "GRPOConfig",
        "trl.trainer.base_config": "_BaseConfig",
        "transformers.training_args": "TrainingArguments",
    }
    return frozenset().union(*(dataclass_fields(module, name) for module, name in modules.items()))


@cache
def dataclass_fields(module: str, name: str) -> frozenset[str]:
    """Returns the annotated fields of a class, without those that it inherits. Raises LookupError."""
    package, _, rest = module.partition(".")
    root = Path(importlib.util.find_spec(package).origin).parent
    tree = ast.parse((root / (rest.replace(".", "/") + ".py")).read_text(encoding="utf8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(item.target.id for item in node.body if isinstance(item, ast.AnnAssign))
    raise LookupError(f"{module} has no class {name}; the pinned versions in pyproject.toml have.")
