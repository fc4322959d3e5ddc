"""otb/seams.py against the installed libraries, and against what the files of the project use of their insides."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from trl import GRPOTrainer

from experiments.running.run_trainer import RunTrainer
from otb import seams
from otb.seams import SEAMS, Seam, assigned_by, broken, problem_of
from otb.training import trainer

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("otb", "experiments", "analysis", "slurm", "hydra_plugins", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit"}  # of named tuples and of os: their underscore means nothing
TRAINERS = {
    "otb.training.trainer",
    "otb.measuring_trainer",
    "otb.lean_trainer",
    "otb.improving_trainer",
    "otb.methods.tool_rollouts",
}
TRAINERS |= {"experiments.running.evaluating_trainer", "experiments.running.run_trainer"}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[^_].*", name))


def names_defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def names_used(tree: ast.AST) -> Iterator[str]:
    """Attributes that a file reads, writes, or names in getattr and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from (part.value for part in node.args[1:2] if isinstance(part, ast.Constant))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every `from module import name`, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf8")) for path in FILES}
OURS = {name for tree in TREES.values() for name in names_defined(tree)}
TRAINERS_OWN = {name for name in {*dir(GRPOTrainer), *assigned_by(GRPOTrainer)} if is_private(name)}


def relied_on(file: str) -> set[str]:
    """The private names of other libraries that a file uses, and what it imports from their inner modules."""
    tree, private = TREES[file], set()
    for module, name in imports(tree):
        inner = module.startswith("trl.") or any(is_private(part) for part in [*module.split("."), name])
        if inner and module.split(".")[0] not in FOLDERS:
            private.add(name)
    used = {name for name in names_used(tree) if is_private(name)}
    private |= used - OURS - DOCUMENTED
    module = file.removesuffix(".py").replace("/", ".")
    if TRAINERS & {module, *(module for module, _ in imports(tree))}:
        private |= (used | set(names_defined(tree))) & TRAINERS_OWN
    return private


def listed_for(file: str) -> set[str]:
    """The names that SEAMS lists for a file, and the classes that it lists them of."""
    listed = SEAMS.get(file, ())
    return {part for seam in listed for part in (name_of(seam), seam.owner.partition(":")[2])}


def name_of(seam: Seam) -> str:
    return seam.name.partition("(")[0].strip('"')


def test_the_installed_libraries_have_every_name_that_is_listed():
    assert not list(broken()), "\n".join(broken())


@pytest.mark.parametrize("file", TREES)
def test_a_file_uses_no_private_name_of_a_library_that_is_not_listed_for_it(file):
    unlisted = relied_on(file) - listed_for(file)
    assert not unlisted, f"{file} relies on {sorted(unlisted)}: add them to SEAMS in otb/seams.py, with a word why"


@pytest.mark.parametrize("file", SEAMS)
def test_every_listed_name_is_still_used_by_its_file(file):
    text = (ROOT / file).read_text(encoding="utf8")
    unused = {name for name in map(name_of, SEAMS[file]) if name not in text}
    assert not unused, f"{file} no longer uses {sorted(unused)}: take them out of otb/seams.py"


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("json", "loads(s, *, cls)", ""), ""),
        (Seam("json", "loads(text)", ""), "its parameters are s, "),
        (Seam("json", "loads(s, *, speed)", ""), "its parameters are s, "),
        (Seam("json", "reads", ""), "it has no such name"),
        (Seam("json.decoder", '"strict"', ""), "its source has no such string"),
        (Seam("json.decoder", '"Extra data"', ""), ""),
        (Seam("json.decoder:JSONDecoder", "object_hook", ""), ""),  # assigned in __init__
        (Seam("json.decoder:NoDecoder", "decode", ""), "it cannot be imported"),
        (Seam("no_such_library", "name", ""), "it cannot be imported"),
    ],
)
def test_a_name_that_has_moved_is_told_with_what_stands_there_now(seam, problem):
    assert problem_of(seam).startswith(problem) and bool(problem_of(seam)) == bool(problem)


def test_a_broken_name_is_told_with_its_file_and_its_purpose(monkeypatch, capsys):
    monkeypatch.setattr(
        seams, "SEAMS", {"otb/training/trainer.py": (Seam("trl:GRPOTrainer", "_no_such_hook()", "for a test"),)}
    )
    assert seams.main() == 1
    expected = "otb/training/trainer.py relies on _no_such_hook() of trl:GRPOTrainer (for a test): it has no such name"
    assert capsys.readouterr().out.strip() == expected


# ---- the order of a step, at the top of otb/training/trainer.py

LEVELS = {"RunTrainer": "Run", "ToolTrainer": "Tool", "OTBTrainer": "OTB", "MeasuringTrainer": "Measuring"}
LEVELS |= {"LeanTrainer": "Lean", "ImprovingTrainer": "Improving", "GRPOTrainer": "GRPO", "Trainer": "HF"}
LINE = re.compile(rf"^ {{4,}}(\w+) +((?:{'|'.join(LEVELS.values())})(?: > \w+)*)\b", re.MULTILINE)


def test_the_order_of_a_step_names_the_classes_that_take_part_in_each_hook():
    """Of each hook: all of this project's classes that define it, then the first below them."""
    order = dict(LINE.findall(trainer.__doc__))  # a hook that is called in two places stands there twice, alike
    assert len(order) == 17 and len(set(LINE.findall(trainer.__doc__))) == 17
    for hook, classes in order.items():
        defining = [LEVELS[kind.__name__] for kind in inspect.getmro(RunTrainer) if hook in vars(kind)]
        foreign = next((i for i, level in enumerate(defining) if level in ("GRPO", "HF")), len(defining))
        assert classes.split(" > ") == defining[: foreign + 1], hook


def test_the_order_of_a_step_leaves_out_no_hook_that_two_classes_extend():
    kinds = inspect.getmro(RunTrainer)
    ours = kinds[: kinds.index(GRPOTrainer)]
    hooks = {hook for kind in ours for hook in vars(kind) if not hook.startswith("__")}
    twice = {hook for hook in hooks if sum(hook in vars(kind) for kind in ours) > 1}
    checkpoints = {"_load_optimizer_and_scheduler", "_save_optimizer_and_scheduler"}
    outside = checkpoints | {"_get_train_sampler", "_name", "_tag_names"}  # not in every step
    assert twice - outside <= dict(LINE.findall(trainer.__doc__)).keys()
