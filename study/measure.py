"""Measures claim C1 of the study: the noise of the true gradient, of tiny policies and of a real language model.

`python study/run.py claim_c1` calls it. A policy of a recipe conf/experiment/claim_c1*.yaml is measured at the
start, at half and at the end of its run; each measurement adds its rows, one per prompt, estimator and group size, to
study/rows/RECIPE.csv at once. `claim_c1_real` measures SmolLM2-135M-Instruct after a supervised warm start. Runs
and measurements are the commands that a user types; a killed one goes on where it was.
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

STAGES = {"start": 0.0, "half": 0.5, "end": 1.0}  # parts of the run after which a policy is measured
# The two that are compared, what OTB's gain is made of, and the rest of the main arms (study/rules.md).
ESTIMATORS = ("rloo", "otb", "otb_loo", "otb_exact", "otb_carry", "sequence_energy", "grpo", "none", "trajectory_cv")
REAL_MODEL = ("model=smollm2-135m", "task=arithmetic")
# Exact scores of a token cost a backward pass: fewer prompts and rollouts than the tiny policies have, and a space that
# they fit in. At its start an adapter's B is 0, so its gradient is a random projection of the layers' whole gradients.
REAL_SIZE = ("prompts=12", "samples=32", "group_sizes=[4,8,16]", "fit_steps=2", "prompts_per_step=8")
REAL_SPACE = ("model.lora.r=4",)
SIZES = {"arithmetic_long": ("prompts=8",)}  # its responses are eight times as long as those of the short tasks


class Policy(NamedTuple):
    """A policy that is measured. seed: of its warm start."""

    task: str
    seed: int
    stage: str


def policies(task: str, runs: list[list[str]]) -> list[Policy]:
    """Returns the policies of a recipe, the first warm start at all its stages first. runs: overrides of each run."""
    found = [dict(override.split("=", 1) for override in run) for run in runs]
    return [Policy(task, int(run["+model.warm_start.seed"]), stage) for run in found for stage in STAGES]


def measure(recipe: str, asked_for: list[Policy], steps: int, parallel: int | None, file: Path, folder: Path) -> None:
    """Measures the policies of a recipe that have no rows in `file`. Raises RunError where a command fails.

    steps: of a whole run. folder: of the runs.
    """
    known = noise.measured(file)
    missing = [policy for policy in asked_for if policy not in known]
    print(f"{recipe}: {len(asked_for)} measurements, {len(asked_for) - len(missing)} of them have rows", flush=True)
    for policy in missing:
        of_warm_start = f"+model.warm_start.seed={policy.seed}"
        asked = [f"task={policy.task}", of_warm_start]
        # A run for each stage, though the longer one repeats the shorter: a run keeps its last and its best checkpoint
        # alone, and other rows may ask for the policy at half once more.
        place = folder / "c1" / "-".join([policy.task, str(policy.seed), policy.stage])
        if step := int(steps * STAGES[policy.stage]):
            typed("run", f"experiment={recipe}", *asked, f"steps={step}", f"runs_dir={place}")
            (checkpoint,) = place.glob(f"*/*/checkpoints/step-{step:08d}")
            asked.append(f"checkpoint={checkpoint}")
        noise.add(moments(place, parallel, *asked, *SIZES.get(policy.task, ())), policy, file)


def measure_real(where: list[str], parallel: int | None, file: Path, folder: Path) -> None:
    """Measures the real model unless `file` has its rows. Raises RunError where a command fails.

    where: overrides that say where its weights are, if not on the hub.
    """
    policy = Policy(REAL, 0, "start")
    known = policy in noise.measured(file)
    print(f"claim_c1_real: 1 measurement, {int(known)} of them have rows", flush=True)
    if known:
        return
    warm = warm_start_real(where, folder)
    asked = [*REAL_MODEL, f"model.name={warm}", *REAL_SIZE, *REAL_SPACE]
    noise.add(moments(folder / "c1-real", parallel, *asked), policy, file)


def warm_start_real(where: list[str], folder: Path) -> Path:
    """Makes the real model's supervised pass, unless it is there, and returns the folder of its weights.

    where, folder: as in `measure_real`. Raises RunError where the command fails.
    """
    warm = folder / "c1-real" / "warm"
    typed("warm_start", *REAL_MODEL, *where, f"output={warm}")
    return warm


def moments(place: Path, parallel: int | None, *asked: str) -> pd.DataFrame:
    """Returns what experiments/variance.py measures of a policy. place: the folder that it measures in."""
    workers = [f"workers={parallel}"] if parallel else []
    typed("variance", *asked, f"estimators=[{','.join(ESTIMATORS)}]", "oracle.prompts=0", f"runs_dir={place}", *workers)
    newest = max(place.glob("variance/*/moments.csv"), key=lambda file: file.stat().st_mtime_ns)
    return pd.read_csv(newest)  # an earlier one is of other weights


def typed(command: str, *arguments: str) -> None:
    """Runs one of the project's commands and shows what it prints. Raises RunError where it fails."""
    line = [sys.executable, str(CONF.parent / "experiments" / f"{command}.py"), *arguments]
    if (code := subprocess.run(line, check=False).returncode) != 0:
        raise RunError(f"python experiments/{command}.py {' '.join(arguments)} ended with {code}; see above.")
