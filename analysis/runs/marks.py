"""What a run is: its arm, group size, seed and setting, from its configuration; and which runs must not be compared.

A *setting* is everything in the configuration but the arm, the group size and the seed. Called by load.py.
"""

from __future__ import annotations

import hashlib
import json
import re

import pandas as pd

from analysis.arms import label
from otb.records import WHERE_AND_HOW, is_one_of

AXES = ("baseline", "group_size", "seed")
# What changes neither the policy nor what is measured of it. Runs of different `steps` share a setting and are marked.
NO_SETTING = (*WHERE_AND_HOW, *AXES, "deterministic", "hydra", "log_energy", "measure_gradient_noise")
FACTS = ("run", "kind", "outcome", "error", "last_step", "version", "libraries", "commit", "device", "damaged_lines")
MARKS = ("arm", "setting", "left_out", "marks")
SHIPPED_ARGUMENTS = {  # arguments of conf/baseline/NAME.yaml that the bare name stands for
    "otb": {"tail": "zero"},
    "otb_exact": {"tail": "zero"},
    "otb_loo": {"tail": "carry"},
    "value": {"learning_rate": 1e-3, "epochs": 10},
    "damped_probe": {"pseudo_rollouts": 100.0, "decay": 0.9},
    "energy_probe": {"pseudo_rollouts": 100.0, "decay": 0.9, "group_correction": False},
    "trajectory_cv": {"pseudo_rollouts": 100.0, "decay": 0.9},
}


def arm_name(run: dict) -> str:
    """From the configuration: the baseline's function and the arguments that its yaml does not ship."""
    if run["kind"] == "trl":
        return f"TRL: {run['run']}"
    target = run.get("baseline._target_")
    if not isinstance(target, str):
        return "unknown"
    module, name = target.split(".")[-2:]
    name = module if name[0].isupper() else name  # the class of a baseline that learns is named for its file
    given = {key.removeprefix("baseline."): value for key, value in run.items() if key.startswith("baseline.")}
    shipped = SHIPPED_ARGUMENTS.get(name, {})
    arguments = {
        key: value
        for key, value in sorted(given.items())
        if not key.startswith("_") and not pd.isna(value) and shipped.get(key) != value
    }
    return " ".join([name, *(f"{key}={value}" for key, value in arguments.items())])


def setting_keys(runs: pd.DataFrame) -> list[str]:
    """The configuration columns that a setting consists of."""
    keys = [column for column in runs.columns if column not in (*FACTS, *MARKS, *AXES)]
    return [key for key in keys if not is_one_of(key, NO_SETTING)]


def describe_runs(runs: pd.DataFrame, include: tuple[str, ...]) -> tuple[pd.DataFrame, list[str]]:
    """Adds arm, setting, left_out (why a run stands in no figure, or "") and marks. -> (runs, warnings)."""
    for column in (*FACTS, "group_size", "seed", "steps"):
        if column not in runs:
            runs[column] = None
    runs = runs.sort_values("run", ignore_index=True)
    rows = runs.to_dict("records")
    runs["baseline"] = [arm_name(row) for row in rows]
    for column in ("group_size", "seed", "steps"):
        runs[column] = pd.to_numeric(runs[column], errors="coerce")
    runs["arm"] = [label(*pair) for pair in zip(runs.baseline, runs.group_size, strict=True)]
    keys = setting_keys(runs)
    runs["setting"] = [setting_name(row, keys) if row["kind"] == "otb" else "" for row in rows]
    runs["left_out"], runs["marks"] = "", ""
    warnings = []
    for kind, marked, reason in marked_runs(runs):
        out = kind not in include and kind != "commits"
        column = "left_out" if out else "marks"
        runs.loc[marked, column] = runs.loc[marked, column].mask(runs.loc[marked, column] == "", reason)
        names = list(runs.run[marked])
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        hint = f"; include={kind} uses them" if out and kind in ("unfinished", "versions", "lengths") else ""
        warnings.append(f"{'left out' if out else 'marked'}: {shown}: {reason}{hint}")
    return runs, warnings


def marked_runs(runs: pd.DataFrame):
    """(kind, bool per run, reason) for each reason not to compare runs. An outside run belongs to no comparison."""
    ours = runs.kind == "otb"
    for name, reason in (("moved aside", "moved aside by overwrite=true"), ("unfinished", "not finished")):
        if (marked := ours & (runs.outcome == name)).any():
            yield name, marked, reason
    live = ours & runs.outcome.isin(["finished", "diverged"])
    for _, group in runs[live].groupby("setting"):
        for kind, column, what in (("versions", "libraries", "versions"), ("versions", "version", "version of otb")):
            usual = group[column].mode().iloc[-1]  # of equally many the newer
            if len(other := group[group[column] != usual]):
                found = ", ".join(sorted(set(other[column])))
                yield kind, runs.index.isin(other.index), f"other {what} ({found}) than most ({usual})"
        if group.commit.nunique() > 1:
            yield "commits", runs.index.isin(group.index), f"made at {group.commit.nunique()} commits of the code"
        usual = group.steps.mode().max()
        if len(other := group[group.steps != usual]):
            yield "lengths", runs.index.isin(other.index), f"other number of steps than most ({usual:.0f})"
    left = runs[ours & (runs.left_out == "")]  # `describe_runs` has filled in what was said so far
    if (twice := left.duplicated(["setting", *AXES])).any():
        yield "duplicates", runs.index.isin(left.index[twice]), "a second run of one arm, group size and seed"


def setting_name(row: dict, keys: list[str]) -> str:
    """TASK-MODEL#digest: short, and equal exactly where the configurations are."""
    found = {key: row[key] for key in keys if not _absent(row.get(key))}
    digest = hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:6]
    task = found.get("task.name") or re.sub(r".*\.", "", str(found.get("task._target_", "task"))).lower()
    model = str(found.get("model.name", "model")).rstrip("/").rsplit("/", 1)[-1]
    return f"{task}-{model}#{digest}"


def _absent(value) -> bool:
    return value is None or (isinstance(value, float) and pd.isna(value))


def setting_differences(runs: pd.DataFrame) -> dict[str, list]:
    """configuration key -> its values, for every key in which the settings of these runs differ."""
    ours = runs[runs.kind == "otb"]
    values = {key: [None if _absent(v) else v for v in ours[key]] for key in setting_keys(runs)}
    return {key: sorted(set(map(str, found))) for key, found in values.items() if len(set(map(str, found))) > 1}
