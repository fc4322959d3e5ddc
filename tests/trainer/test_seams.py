"""Tests otb/seams.py against the installed libraries, and against the project's use of their internals."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trl import GRPOTrainer

from otb import seams
from otb.seams import SEAMS, assigned_by, broken, problem_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("otb", "experiments", "analysis", "slurm", "hydra_plugins", "benchmarks", "study")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit"}  # of named tuples and of os: their underscore means nothing


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[^_].*", name))


def names_defined(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yields attributes that a file reads, writes, or names in getattr, hasattr or setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from (part.value for part in node.args[1:2] if isinstance(part, ast.Constant))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (module, name) of every `from module import name`, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf8")) for path in FILES}
OF_TRL = set(dir(GRPOTrainer)) | assigned_by(GRPOTrainer)
OURS = {name for tree in TREES.values() for name in names_defined(tree)} - OF_TRL
LISTED = {name.partition("(")[0].strip('"') for names in SEAMS.values() for name in names}
OWNERS = {owner.partition(":")[2] for owner in SEAMS}


def relied_on(file: str) -> set[str]:
    """Returns the private names of other libraries that a file uses, and its imports from their private modules."""
    tree, private = TREES[file], set()
    for module, name in imports(tree):
        inner = module.startswith("trl.") or any(is_private(part) for part in [*module.split("."), name])
        if inner and module.split(".")[0] not in FOLDERS:
            private.add(name)
    used = {name for name in names_used(tree) if is_private(name)}
    overridden = {name for name in names_defined(tree) if is_private(name) and name in OF_TRL}
    extends = any(name in ("GRPOTrainer", "OTBTrainer") for _, name in imports(tree))
    return private | (used - OURS - DOCUMENTED) | (overridden if extends else set())


def test_the_installed_libraries_have_every_name_that_is_listed():
    assert not list(broken()), "\n".join(broken())


@pytest.mark.parametrize("file", TREES)
def test_a_file_uses_no_private_name_of_a_library_that_is_not_listed(file):
    unlisted = relied_on(file) - LISTED - OWNERS
    assert not unlisted, f"{file} relies on {sorted(unlisted)}: add them to SEAMS in otb/seams.py, with a word why"


def test_every_listed_name_is_still_used():
    text = "\n".join(path.read_text(encoding="utf8") for path in FILES if path.name != "seams.py")
    unused = {name for name in LISTED if name not in text}
    assert not unused, f"nothing uses {sorted(unused)}: take them out of otb/seams.py"


@pytest.mark.parametrize(
    ("owner", "name", "problem"),
    [
        ("json", "loads(s, *, cls)", ""),
        ("json", "loads(text)", "its parameters are s, "),
        ("json", "loads(s, *, speed)", "its parameters are s, "),
        ("json", "reads", "it has no such name"),
        ("json.decoder", '"strict"', "its source has no such string"),
        ("json.decoder", '"Extra data"', ""),
        ("json.decoder:JSONDecoder", "object_hook", ""),  # assigned in __init__
        ("json.decoder:NoDecoder", "decode", "it cannot be imported"),
        ("no_such_library", "name", "it cannot be imported"),
    ],
)
def test_a_name_that_has_moved_is_reported_with_what_is_there_now(owner, name, problem):
    assert problem_of(owner, name).startswith(problem) and bool(problem_of(owner, name)) == bool(problem)


def test_a_broken_name_is_reported_with_its_purpose(monkeypatch, capsys):
    monkeypatch.setattr(seams, "SEAMS", {"trl:GRPOTrainer": {"_no_such_hook()": "for a test"}})
    assert seams.main() == 1
    expected = "_no_such_hook() of trl:GRPOTrainer (for a test): it has no such name"
    assert capsys.readouterr().out.strip() == expected
