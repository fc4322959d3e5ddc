"""Who may import whom, and what may not import torch: the house of README, enforced."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"(import|from) \w")  # at the top: inside a function or under TYPE_CHECKING it is indented
ANALYSIS_MAY_IMPORT = {
    *("otb.records.config_keys", "otb.errors", "otb.files", "otb.records.metric_names", "otb.records"),
    "otb.laboratory.statistics",
}
LEAF_MAY_IMPORT = {
    "errors": set(),
    "files": {"otb.errors"},
    "metric_names": set(),
    "config_keys": set(),
    "records": {"otb.errors", "otb.files"},
    "values": set(),
    "options": {"otb", "otb.values"},
    "score_norms": set(),
    "exact_norms": {"otb.errors"},
    "gradient_noise": set(),
    "token_weights": {"otb.values"},
    "improvement": {"otb.values"},
    "auxiliary": {"otb.values"},
    "mtp": set(),
    "adapters": set(),
    "tasks.grading": {"otb.tasks.grader_process"},
    "policies.tiny_policy": set(),
    "policies.folders": {"otb.errors", "otb.files"},
    "policies.models": {
        "otb.errors",
        "otb.files",
        "otb.policies.folders",
        "otb.policies.gguf_files",
        "otb.policies.merged_adapters",
        "otb.policies.mimo",
        "otb.policies.templates",
        "otb.policies.tiny_policy",
        "otb.policies.tiny_warm_start",
        "otb.tasks.arithmetic",
    },
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
    return {name for name in found if name.split(".")[0] in ("otb", "analysis", "experiments", "slurm", "study")}


def test_baselines_import_neither_torch_nor_trl_nor_each_other():
    for path in (ROOT / "otb" / "baselines").glob("*.py"):
        allowed = {"otb.baselines", "otb.baselines.weighted_mean", "otb.baselines.ridge_probe", "otb.values"}
        assert imports_of(path) <= allowed, path.name
        at_top = {line.split()[1].split(".")[0] for line in path.read_text().splitlines() if IMPORT.match(line)}
        assert not at_top & {"torch", "trl", "transformers"}, path.name


def test_analysis_imports_only_the_records_and_itself():
    for path in (ROOT / "analysis").rglob("*.py"):
        outside = {name for name in imports_of(path) if not name.startswith("analysis")}
        assert outside <= ANALYSIS_MAY_IMPORT, path.name


@pytest.mark.parametrize(
    "room", ["otb", "analysis", "experiments", "slurm", "hydra_plugins", "benchmarks", "notebooks"]
)
def test_nothing_imports_the_study(room):
    """It may import everything. A notebook shows its figures."""
    importing = [path.name for path in (ROOT / room).rglob("*.py") if any("study" in name for name in imports_of(path))]
    assert not importing


def test_the_library_neither_imports_nor_starts_what_is_built_on_it():
    for path in (ROOT / "otb").rglob("*.py"):
        assert {name.split(".")[0] for name in imports_of(path)} <= {"otb"}, path.name
        assert "runpy" not in path.read_text(encoding="utf8"), path.name


@pytest.mark.parametrize("leaf", LEAF_MAY_IMPORT)
def test_leaves_import_nothing_of_the_project_beyond_what_is_listed(leaf):
    assert imports_of(ROOT / "otb" / f"{leaf.replace('.', '/')}.py") <= LEAF_MAY_IMPORT[leaf]


def test_laboratory_reads_the_mathematics_and_samples_by_the_trainer_alone():
    """Statistics, scores and the oracle need neither TRL nor a configuration; sampling.py alone goes through TRL."""
    names = (
        "errors",
        "files",
        "baselines",
        "advantages",
        "rollouts",
        "score_norms",
        "exact_norms",
        "policies",
        "policies.models",
    )
    mathematics = {"otb", *(f"otb.{name}" for name in names)}
    sampling = {"otb.loss_inputs", "otb.training.trainer", "otb.methods.tool_rollouts", "otb.baselines.none"}
    for path in (ROOT / "otb" / "laboratory").glob("*.py"):
        outside = {name for name in imports_of(path) if not name.startswith("otb.laboratory")}
        assert outside <= (sampling if path.name == "sampling.py" else mathematics), path.name


def test_slurm_builds_on_the_light_half_of_the_experiments():
    """Whatever imports torch stays out of the submitting side and of the process that watches over a job."""
    named = ("experiments.running.summary", "experiments.running.run_lock", "experiments.running.warning_signal")
    named += ("otb.records.config_keys", "otb.errors", "otb.files", "otb.records")
    for path in (ROOT / "slurm").glob("*.py"):
        for name in imports_of(path):
            assert name in named or name.startswith(("slurm", "experiments.sweeps")), f"{path.name} imports {name}"
    for path in (ROOT / "experiments" / "sweeps").glob("*.py"):
        assert not {"experiments.running.train", "experiments.run"} & imports_of(path), path.name


LIGHT = [
    "otb",
    "otb.errors",
    "otb.training.options",
    "otb.records",
    "otb.values",
    "otb.records.metric_names",
    "otb.records.config_keys",
    "otb.methods.improvement",
    "otb.methods.token_weights",
    "otb.methods.auxiliary",
    "otb.baselines.otb",
    "otb.baselines.energy_probe",
    "otb.baselines.trajectory_cv",
    "otb.sandbox.bubblewrap",
    "otb.sandbox.remote",
    "otb.sandbox.unsafe",
    "otb.tasks.grading",
    "otb.tasks.maths",
    "experiments.planning.fit",
    "experiments.plan",
    "experiments.evaluate",
    "experiments.run",
    "experiments.running.run_lock",
    "experiments.checks",
    "experiments.running.command_line",
    "experiments.running.identity",
    "experiments.running.threads",
    "experiments.running.trackers",
    "experiments.sweeps.local",
    "experiments.sweeps.runs_of",
    "experiments.variance",
    "experiments.warm_start",
    "experiments.running.warning_signal",
    "hydra_plugins.otb_launchers",
    "slurm",
    "slurm.job",
    "slurm.rank",
    "slurm.status",
    "slurm.submit",
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_the_light_modules_imports_neither_torch_nor_sympy(module):
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'trl', 'transformers', 'sympy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
