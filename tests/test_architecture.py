"""Who may import whom, and what may not import torch: the house of README, enforced."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORT = re.compile(r"(import|from) \w")  # at the top: inside a function or under TYPE_CHECKING it is indented
ANALYSIS_MAY_IMPORT = {"otb.records"}
LEAVES = ("score_norms", "exact_norms", "gradient_noise", "grading", "models", "records", "tiny_policy", "options")
LEAVES += ("warning_signal",)
LEAF_MAY_IMPORT = {
    "exact_norms": {"otb.records"},
    "grading": {"otb.grader_process"},
    "models": {"otb.records", "otb.tiny_policy", "otb.warm_start", "otb.tasks.arithmetic"},
    "options": {"otb"},
}


def imports_of(path: Path) -> set[str]:
    """Modules of this project that a file imports, at any depth; type-checking imports are left out."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("otb", "analysis", "experiments", "slurm")}


def test_baselines_import_neither_torch_nor_trl_nor_each_other():
    for path in (ROOT / "otb" / "baselines").glob("*.py"):
        allowed = {"otb.baselines", "otb.baselines.weighted_mean", "otb.baselines.ridge_probe"}
        assert imports_of(path) <= allowed, path.name
        at_top = {line.split()[1].split(".")[0] for line in path.read_text().splitlines() if IMPORT.match(line)}
        assert not at_top & {"torch", "trl", "transformers"}, path.name


def test_analysis_imports_only_the_records_and_itself():
    for path in (ROOT / "analysis").glob("*.py"):
        outside = {name for name in imports_of(path) if not name.startswith("analysis")}
        assert outside <= ANALYSIS_MAY_IMPORT, path.name


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_import_nothing_of_the_project_beyond_what_is_listed(leaf):
    assert imports_of(ROOT / "otb" / f"{leaf}.py") <= LEAF_MAY_IMPORT.get(leaf, set())


def test_laboratory_reads_the_mathematics_and_samples_by_the_trainer_alone():
    """Statistics, scores and the oracle need neither TRL nor a configuration; sampling.py alone goes through TRL."""
    mathematics = {"otb", *(f"otb.{name}" for name in ("baselines", "advantages", "rollouts", "models"))}
    mathematics |= {"otb.score_norms", "otb.exact_norms"}
    sampling = {"otb.trainer", "otb.tool_rollouts", "otb.baselines.none"}
    for path in (ROOT / "otb" / "laboratory").glob("*.py"):
        outside = {name for name in imports_of(path) if not name.startswith("otb.laboratory")}
        assert outside <= (sampling if path.name == "sampling.py" else mathematics), path.name


def test_only_the_trainers_touch_the_inside_of_trl():
    for path in (ROOT / "otb").rglob("*.py"):
        if path.name not in ("trainer.py", "tool_calls.py"):
            assert "from trl" not in path.read_text(), path.name


def test_slurm_builds_on_the_light_half_of_the_experiments():
    """Whatever imports torch stays out of the submitting side and of the process that watches over a job."""
    light = {"local_sweep", "run_state", "snapshot", "summary", "sweep", "sweep_display", "sweep_plan"}
    allowed = {"otb.records", "otb.run_lock", "otb.warning_signal", *(f"experiments.{name}" for name in light)}
    for path in (ROOT / "slurm").glob("*.py"):
        outside = {name for name in imports_of(path) if not name.startswith("slurm")}
        assert outside <= allowed, path.name
    for name in light - {"summary"}:
        assert not {"experiments.train", "experiments.run"} & imports_of(ROOT / "experiments" / f"{name}.py"), name


LIGHT = ["otb", "otb.records", "otb.run_lock", "otb.options", "otb.warning_signal", "otb.baselines.otb"]
LIGHT += ["otb.baselines.energy_probe", "otb.baselines.trajectory_cv"]
LIGHT += [
    "experiments.settings",
    "experiments.run",
    "experiments.variance",
    "experiments.local_sweep",
    "experiments.sweep_plan",
]
LIGHT += ["slurm", "slurm.submit", "slurm.status", "slurm.job", "slurm.rank", "hydra_plugins.otb_launchers"]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_light_modules_imports_no_torch(module):
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'trl', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
