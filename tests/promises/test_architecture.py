"""Who may import whom, and what may not import torch: the house of README, enforced."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

IMPORT = re.compile(r"(import|from) \w")  # at the top: inside a function or under TYPE_CHECKING it is indented
HOUSES = {  # folder -> folders that it may import; nothing imports the study, the benchmarks or the notebooks
    "otb": set(),
    "analysis": {"otb"},
    "experiments": {"otb", "analysis"},
    "slurm": {"otb", "experiments"},
    "hydra_plugins": {"experiments", "slurm"},
    "benchmarks": {"otb", "analysis", "experiments"},
    "study": {"otb", "analysis", "experiments", "hydra_plugins"},
}
# Each folder of otb imports those before it alone. The files beside them are the ground, and the options of a run with
# them: open to all.
FLOORS = ["sandbox", "records", "baselines", "tasks", "policies", "methods", "training", "laboratory"]
GROUND = ("otb.training.options",)
OPEN_TO_ANALYSIS = ("otb.records", "otb.errors", "otb.files", "otb.laboratory.statistics")
OPEN_TO_SLURM = ("otb", "experiments.sweeps", "experiments.running.run_lock", "experiments.running.warning_signal")


def imports_of(path: Path) -> set[str]:
    """Modules of this project that a file imports, at any depth; type-checking imports are left out."""
    tree, found = ast.parse(path.read_text(encoding="utf8")), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            within = [alias.name for alias in node.names if is_there(f"{node.module}.{alias.name}")]
            found |= {f"{node.module}.{name}" for name in within}
            found |= {node.module} if len(within) < len(node.names) else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in HOUSES}


def is_there(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


@pytest.mark.parametrize("house", HOUSES)
def test_a_folder_imports_only_folders_that_it_builds_on(house):
    for path in (ROOT / house).rglob("*.py"):
        assert {name.split(".")[0] for name in imports_of(path)} <= HOUSES[house] | {house}, path.relative_to(ROOT)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_folder_of_the_library_imports_only_the_ground_and_the_folders_below_it(floor):
    above = tuple(f"otb.{name}" for name in FLOORS[FLOORS.index(floor) + 1 :])
    for path in (ROOT / "otb" / floor).rglob("*.py"):
        found = [name for name in imports_of(path) if below(name, above) and not below(name, GROUND)]
        assert not found, path.relative_to(ROOT)


def test_the_table_names_every_folder_of_the_library():
    assert {path.parent.name for path in (ROOT / "otb").glob("*/__init__.py")} == set(FLOORS)


def test_baselines_import_neither_torch_nor_trl_nor_each_other():
    shipped = {f"otb.baselines.{path.stem}" for path in (ROOT / "conf" / "baseline").glob("*.yaml")}
    for path in (ROOT / "otb" / "baselines").glob("*.py"):
        outside = {name for name in imports_of(path) if not below(name, ("otb.baselines", "otb.values"))}
        assert not outside and not imports_of(path) & shipped, path.name
        at_top = {line.split()[1].split(".")[0] for line in path.read_text().splitlines() if IMPORT.match(line)}
        assert not at_top & {"torch", "trl", "transformers"}, path.name


def test_statistics_scores_and_oracle_of_the_laboratory_need_no_trainer():
    for path in (ROOT / "otb" / "laboratory").glob("*.py"):
        through = [name for name in imports_of(path) if below(name, ("otb.training", "otb.methods"))]
        assert not through or path.name == "sampling.py", path.name


def test_analysis_reads_records_and_nothing_else_of_the_library():
    for path in (ROOT / "analysis").rglob("*.py"):
        outside = {name for name in imports_of(path) if not below(name, ("analysis", *OPEN_TO_ANALYSIS))}
        assert not outside, path.relative_to(ROOT)


def test_slurm_builds_on_the_light_half_of_the_experiments():
    """Whatever imports torch stays out of the submitting side and of the process that watches over a job."""
    for path in (ROOT / "slurm").rglob("*.py"):
        outside = {name for name in imports_of(path) if not below(name, ("slurm", *OPEN_TO_SLURM))}
        assert not outside, path.relative_to(ROOT)


def test_importing_what_answers_at_once_imports_neither_torch_nor_sympy():
    """The commands, what submits and watches a job, and what a script imports to be refused before a model loads."""
    entries = [path for folder in ("experiments", "slurm", "hydra_plugins") for path in (ROOT / folder).glob("*.py")]
    light = ["otb", "otb.training.options", "otb.tasks.maths", "otb.sandbox.bubblewrap", "otb.sandbox.remote"]
    light += [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in entries]
    code = (
        f"import importlib, sys\nfor name in {light}:\n importlib.import_module(name.removesuffix('.__init__'))\n"
        " heavy = {'torch', 'trl', 'transformers', 'sympy'} & set(sys.modules)\n"
        " if heavy: sys.exit(f'{name} imports {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
