"""Measures claim C1 of the study: the noise of the true gradient, of tiny policies and of a real language model.

A policy of a recipe claim_c1* is measured at the start, at half and at the end of its run. Each measurement adds its
rows, one per prompt, estimator and group size, to study/rows/RECIPE.csv at once. Runs and measurements are the commands
that a user types, so a killed one resumes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.running.command_line import CONF
from otb.errors import RunError
from study import moments as noise
from study.collected import REAL
from study.recipes import Recipe, typed

STAGES = {"start": 0.0, "half": 0.5, "end": 1.0}  # parts of the run after which a policy is measured
# The two that are compared, those that take OTB's gain apart, and the other main arms (study/rules.md).
ESTIMATORS = ("rloo", "otb", "otb_loo", "otb_exact", "otb_carry", "sequence_energy", "grpo", "none", "trajectory_cv")
WARM_START = "+model.warm_start.seed"


class Policy(NamedTuple):
    """A policy that is measured. seed: of its warm start."""

    task: str
    seed: int
    stage: str


def policies(recipe: Recipe, runs: list[dict]) -> list[Policy]:
    """Returns the policies of a recipe, the first warm start at all its stages first."""
    return [Policy(recipe.fixed["task"], run[WARM_START], stage) for run in runs for stage in STAGES]


def measure(recipe: Recipe, runs: list[dict], parallel: int | None, file: Path, folder: Path) -> None:
    """Measures the policies of a recipe that have no rows in `file`. Raises RunError where a command fails.

    runs: those whose policies are asked for. folder: of the runs.
    """
    known, of_run = noise.measured(file), {run[WARM_START]: run for run in runs}
    asked_for = policies(recipe, runs)
    missing = [policy for policy in asked_for if policy not in known]
    print(
        f"{recipe.name}: {len(asked_for)} measurements, {len(asked_for) - len(missing)} of them have rows", flush=True
    )
    for policy in missing:
        run = of_run[policy.seed]
        asked = [f"task={policy.task}", f"{WARM_START}={policy.seed}"]
        # A run for each stage, though the longer one repeats the shorter: a run keeps its last and its best checkpoint
        # alone, and other rows may ask for the policy at half once more.
        place = folder / "c1" / "-".join([policy.task, str(policy.seed), policy.stage])
        if step := int(run["steps"] * STAGES[policy.stage]):
            command("run", *typed(run | {"steps": step}), f"runs_dir={place}")
            (checkpoint,) = place.glob(f"*/*/checkpoints/step-{step:08d}")
            asked.append(f"checkpoint={checkpoint}")
        noise.add(moments(place, parallel, *asked, *measured_with(recipe)), policy, file)


def measure_real(recipe: Recipe, where: list[str], parallel: int | None, file: Path, folder: Path) -> None:
    """Measures the real model unless `file` has its rows. Raises RunError where a command fails.

    where: overrides that say where its weights are, if not on the hub.
    """
    policy = Policy(REAL, 0, "start")
    known = policy in noise.measured(file)
    print(f"{recipe.name}: 1 measurement, {int(known)} of them have rows", flush=True)
    if known:
        return
    warm = warm_start_real(recipe, where, folder)
    asked = [*real_policy(recipe), f"model.name={warm}", *measured_with(recipe)]
    noise.add(moments(folder / "c1-real", parallel, *asked), policy, file)


def warm_start_real(recipe: Recipe, where: list[str], folder: Path) -> Path:
    """Makes the real model's supervised pass, unless it is there, and returns the folder of its weights.

    where, folder: as in `measure_real`. Raises RunError where the command fails.
    """
    warm = folder / "c1-real" / "warm"
    command("warm_start", *real_policy(recipe), *where, f"output={warm}")
    return warm


def real_policy(recipe: Recipe) -> list[str]:
    """Returns the choice of the real model and of its task, as typed."""
    return typed({key: recipe.fixed[key] for key in ("model", "task")})


def measured_with(recipe: Recipe) -> list[str]:
    """Returns the keys of experiments/variance.py that a recipe measures with, as typed."""
    values = {key: str(value).replace(" ", "") for key, value in (recipe.measured or {}).items()}
    return typed(values)


def moments(place: Path, parallel: int | None, *asked: str) -> pd.DataFrame:
    """Returns what experiments/variance.py measures of a policy. place: the folder that it measures in."""
    workers = [f"workers={parallel}"] if parallel else []
    command(
        "variance", *asked, f"estimators=[{','.join(ESTIMATORS)}]", "oracle.prompts=0", f"runs_dir={place}", *workers
    )
    newest = max(place.glob("variance/*/moments.csv"), key=lambda file: file.stat().st_mtime_ns)
    return pd.read_csv(newest)  # an earlier one is of other weights


def command(name: str, *arguments: str) -> None:
    """Runs one of the project's commands and shows what it prints. Raises RunError where it fails."""
    line = [sys.executable, str(CONF.parent / "experiments" / f"{name}.py"), *arguments]
    if (code := subprocess.run(line, check=False).returncode) != 0:
        raise RunError(f"python experiments/{name}.py {' '.join(arguments)} ended with {code}; see above.")
