"""Keeps one row per finished run of the study, and makes tables of these rows that every figure of analysis/ takes.

A row's key is a digest of the run's configuration, so a command knows on any machine what has been run. The curves of a
run are in cells, as numbers separated by blanks. study/run.py makes the runs and adds their rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from filelock import FileLock

from analysis.arms import arm_name, function_name, label, shipped_baselines
from analysis.runs.marks import FACTS
from analysis.runs.read_run import find_runs, read_run
from analysis.runs.rows import flat_cells
from otb.files import write_atomically
from otb.records.config_keys import WHERE_AND_HOW, is_as_before, is_one_of

EVALUATED = ("evaluation_accuracy", "evaluation_own_tokens_total", "evaluation_response_length_mean")
EVERY_STEP = ("own_tokens_total", "accuracy", "gradient_norm", "response_length_mean", "truncated")
OF_METHODS = ("improvement_phi", "mtp_lambda", "token_weight_support", "log_ppl_abs_diff_mean")  # where a run has them
TIMES = ("seconds_step", "seconds_sampling", "seconds_advantages", "seconds_loss")  # of a run: medians over its steps
CONFIGURED = ("key", "task", "baseline", "group_size", "prompts_per_step", "learning_rate", "seed", "steps")
MADE = ("outcome", "libraries", "commit", "device")
DIGITS = 5
REAL = "arithmetic, SmolLM2-135M"  # what the rows of the real model call its task
ENDED = ("finished", "diverged")
MAIN = "claim_c3_c4"  # what the names of files of rows begin with
FIXED = "C4, rollouts per step fixed"  # compared beside C4: 16 prompts x 4 rollouts with 2 x 32
OTHERS = {"C1": "claim_c1", "C2": "claim_c2", FIXED: "claim_fixed_rollouts"}
COSINE = "claim_c2_cosine"
BESIDE_C2 = {  # what the rules added to its grid
    "claim_c2_between": "rates between",
    COSINE: "a cosine from 2e-3",
    "claim_c2_sgd": "plain SGD, rates 1 to 8 (to be read with the room above the best rate)",
    "claim_c2_sgd_16": "plain SGD at 16",
}


def key_of(config: dict) -> str:
    """Returns 12 hexadecimal digits of what a run computes. config: resolved, nested or with dotted keys."""
    flat = flat_cells(config)
    names = [name for name in flat if not is_one_of(name, (*WHERE_AND_HOW, "hydra")) or name == "steps"]
    identity = {name: flat[name] for name in sorted(names) if not is_as_before(name, flat[name])}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]


def row_of(run: Path) -> dict | None:
    """Returns the row of a run directory; None where the run has not ended."""
    record = read_run(run, run.name)
    facts = record.facts
    if facts["outcome"] not in ENDED:
        return None
    config = {name: value for name, value in facts.items() if name not in FACTS}
    steps, evaluations = record.steps.to_pandas(), record.evaluations.to_pandas()
    facts |= {
        "key": key_of(config),
        "task": function_name(facts["task._target_"]),
        "baseline": arm_name(facts, shipped_baselines()),
    }
    row = {name: facts[name] for name in (*CONFIGURED, *MADE)}
    row |= {name: rounded(steps[name].median()) if name in steps else "" for name in TIMES}
    row["evaluation_step"] = joined(evaluations["step"])
    row |= {name: joined(evaluations[name]) for name in EVALUATED}
    row |= {name: joined(steps[name]) if name in steps else "" for name in EVERY_STEP}
    return row | {name: joined(steps[name]) for name in OF_METHODS if name in steps}


def joined(values: pd.Series) -> str:
    """Returns numbers as the text of a cell."""
    return " ".join(rounded(value) for value in values)


def rounded(value: float) -> str:
    """Returns a number with `DIGITS` significant digits, and leaves whole numbers unchanged."""
    return str(int(value)) if float(value).is_integer() else f"{value:.{DIGITS}g}"


def numbers(cell: str) -> np.ndarray:
    """Returns the numbers of a cell."""
    return np.array(str(cell).split(), float)


def keys_in(file: Path) -> set[str]:
    """Returns the keys of a file of rows; none where there is no file."""
    return set(read(file).key) if file.exists() else set()


def read(file: Path) -> pd.DataFrame:
    """Returns the rows of a file; cells of curves are text."""
    curves = ("evaluation_step", *EVALUATED, *EVERY_STEP, *OF_METHODS)
    return pd.read_csv(file, dtype={"key": str, **dict.fromkeys(curves, str)}, keep_default_na=False)


def of_kind(rows: dict[str, pd.DataFrame], kind: str) -> pd.DataFrame:
    """Returns the rows of all files whose name begins with a kind; empty where there are none."""
    parts = [part for name, part in rows.items() if name.startswith(kind)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["task"])


def add(rows: list[dict], file: Path) -> int:
    """Adds the rows whose keys a file lacks, whole or not at all, sorted; returns how many were new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        known = keys_in(file)
        new = {row["key"]: row for row in rows if row["key"] not in known}
        if new:
            frame = pd.DataFrame(list(new.values()))
            if known:
                frame = pd.concat([read(file), frame.astype(object)])
            varied = ["varied"] if "varied" in frame else []
            frame = frame.sort_values(["task", *varied, "baseline", "group_size", "learning_rate", "seed"])
            write_atomically(file, frame.to_csv(index=False))
    return len(new)


def collect(folder: Path, asked: Mapping[str, str], file: Path) -> int:
    """Adds the ended runs below `folder` that were asked for; returns how many were new.

    asked: key -> what its recipe varies beside the columns that every row has, such as "improvement=pipo", or "".
    """
    found = [row for run in find_runs(folder) if (row := row_of(run)) is not None and row["key"] in asked]
    if file.stem.endswith("_real"):
        found = [row | {"task": REAL} for row in found]
    return add([row | ({"varied": text} if (text := asked[row["key"]]) else {}) for row in found], file)


def steps_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run and step, as `analysis.runs.load.load` does; the setting is the task alone.

    Learning rates, tuned per arm, and batches may differ within it: who compares arms picks the rows.
    """
    tables = []
    for row in rows.to_dict("records"):
        evaluated = pd.DataFrame({name: numbers(row[name]) for name in EVALUATED})
        evaluated.insert(0, "step", numbers(row["evaluation_step"]))
        curves = pd.DataFrame({name: pd.Series(numbers(row[name])) for name in EVERY_STEP if row[name]})
        curves.insert(0, "step", np.arange(1, len(curves) + 1, dtype=float))
        table = curves.merge(evaluated, on="step", how="outer").sort_values("step", ignore_index=True)
        facts = {name: row[name] for name in ("baseline", "group_size", "seed", "outcome", "learning_rate")}
        arm = label(row["baseline"], row["group_size"])
        tables.append(table.assign(run=row["key"], arm=arm, setting=row["task"], kind="otb", **facts))
    return pd.concat(tables, ignore_index=True)
