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
def trainer_fields() -> dict[str, bool]:
    """Returns every option of trl.GRPOConfig, and whether it may be None."""
    classes = {
        "transformers.training_args": "TrainingArguments",
        "trl.trainer.base_config": "_BaseConfig",  # what it annotates anew wins over TrainingArguments
        "trl.trainer.grpo_config": "GRPOConfig",
    }
    return {field: kind for module, name in classes.items() for field, kind in dataclass_fields(module, name).items()}


@cache
def dataclass_fields(module: str, name: str) -> dict[str, bool]:
    """Returns the annotated fields of a class, without those that it inherits, and whether they may be None.

    Raises LookupError.
    """
    package, _, rest = module.partition(".")
    root = Path(importlib.util.find_spec(package).origin).parent
    tree = ast.parse((root / (rest.replace(".", "/") + ".py")).read_text(encoding="utf8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            return {field.target.id: "None" in ast.unparse(field.annotation) for field in fields}
    raise LookupError(f"{module} has no class {name}; the pinned versions in pyproject.toml have.")
