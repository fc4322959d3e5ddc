"""Says what each run is (arm, group size, seed, setting) and which runs must not be compared, and why.

A *setting* is everything in the configuration but the arm, the group size and the seed. Called by load.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

import pandas as pd
from numpy.typing import NDArray

from analysis.arms import arm_name, label, shipped_baselines
from otb.records.config_keys import WHERE_AND_HOW, is_as_before, is_one_of

AXES = ("baseline", "group_size", "seed")
# What changes neither the policy nor what is measured of it. Runs of different `steps` share a setting and are marked.
NO_SETTING = (
    *(*WHERE_AND_HOW, *AXES, "hydra"),
    *("deterministic", "lean_steps", "log_energy", "measure_gradient_noise"),
)
FACTS = ("run", "kind", "outcome", "error", "last_step", "version", "libraries", "commit", "device", "damaged_lines")
ABSENT = "absent or default"
MARKS = ("arm", "setting", "left_out", "marks")


def setting_keys(runs: pd.DataFrame) -> list[str]:
    """Returns the configuration columns that a setting consists of."""
    keys = [str(column) for column in runs.columns if column not in (*FACTS, *MARKS, *AXES)]
    return [key for key in keys if not is_one_of(key, NO_SETTING)]


def describe_runs(facts: list[dict], include: tuple[str, ...]) -> tuple[pd.DataFrame, list[str]]:
    """Makes the table of runs.

    Args:
        facts: per run, what read_run.py found: facts and the flat configuration.
        include: kinds of marked runs that are used all the same.

    Returns:
        (runs, warnings): a row per run with arm, setting, left_out (why it stands in no figure, or "") and marks.
    """
    shipped = shipped_baselines()
    runs = pd.DataFrame([fact | {"baseline": arm_name(fact, shipped)} for fact in facts])
    for column in (*FACTS, "group_size", "seed", "steps"):
        if column not in runs:
            runs[column] = None
    runs = runs.sort_values("run", ignore_index=True)
    rows = runs.to_dict("records")
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
        first = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        hint = f"; --include {kind} uses them" if out and kind in ("unfinished", "versions", "lengths") else ""
        warnings.append(f"{'left out' if out else 'marked'}: {first}: {reason}{hint}")
    return runs, warnings


def marked_runs(runs: pd.DataFrame) -> Iterator[tuple[str, NDArray, str]]:
    """Yields (kind, bool per run, reason) for each reason not to compare runs.

    Plain TRL runs enter no comparison and are not marked.
    """
    ours = runs.kind == "otb"
    for outcome in sorted(set(runs.outcome[ours]) - {"finished", "diverged"}):
        marked = (ours & (runs.outcome == outcome)).to_numpy()
        if outcome == "moved aside":
            yield outcome, marked, "moved aside by overwrite=true"
        else:
            goes_on = outcome in ("unfinished", "running")
            yield "unfinished", marked, "not finished" if goes_on else f"not finished: {outcome}"
    live = ours & runs.outcome.isin(["finished", "diverged"])
    for _, group in runs[live].groupby("setting"):
        for kind, column, what in (("versions", "libraries", "versions"), ("versions", "version", "version of otb")):
            usual = group[column].mode().iloc[-1]  # of equally many the newer
            if len(other := group[group[column] != usual]):
                values = ", ".join(sorted(set(other[column])))
                yield kind, runs.index.isin(other.index), f"other {what} ({values}) than most ({usual})"
        if group.commit.nunique() > 1:
            yield "commits", runs.index.isin(group.index), f"made at {group.commit.nunique()} commits of the code"
        usual = group.steps.mode().max()
        if len(other := group[group.steps != usual]):
            yield "lengths", runs.index.isin(other.index), f"other number of steps than most ({usual:.0f})"
    left = runs[ours & (runs.left_out == "")]  # `describe_runs` has filled in what was said so far
    if (twice := left.duplicated(["setting", *AXES])).any():
        yield "duplicates", runs.index.isin(left.index[twice]), "a second run of one arm, group size and seed"


def setting_name(row: dict, keys: list[str]) -> str:
    """Returns TASK-MODEL#digest, which is short, and equal exactly where the configurations are."""
    values = {key: row[key] for key in keys if not _absent(key, row.get(key))}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:6]
    target = str(values.get("task._target_", "task")).rpartition(".")[2]
    task = values.get("task.name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target).lower()
    model = str(values.get("model.name", "model")).rstrip("/").rsplit("/", 1)[-1]
    return f"{task}-{model}#{digest}"


def _absent(key: str, value) -> bool:
    """Tells whether a run leaves a key at what it was before there was such a key."""
    return value is None or (isinstance(value, float) and pd.isna(value)) or is_as_before(key, value)


def setting_differences(runs: pd.DataFrame) -> dict[str, list]:
    """Returns configuration key -> its values as text, for every key in which the settings of used runs differ."""
    ours = runs[(runs.kind == "otb") & (runs.left_out == "")]
    values = {key: {value_text(key, value) for value in ours[key]} for key in setting_keys(runs)}
    return {key: sorted(texts) for key, texts in values.items() if len(texts) > 1}


def value_text(key: str, value) -> str:
    """Returns a value of a configuration as it is typed; ABSENT where a run leaves the key as if it did not exist."""
    if _absent(key, value):
        return ABSENT
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def setting_labels(runs: pd.DataFrame) -> dict[str, str]:
    """Returns setting -> what distinguishes it from others of its task and model among the used runs.

    "" where there is no other, KEY=VALUE where they differ in one key, else the digest.
    """
    ours = runs[(runs.kind == "otb") & (runs.left_out == "")]
    labels: dict[str, str] = {}
    for _, group in ours.groupby([str(setting).partition("#")[0] for setting in ours.setting]):
        keys = list(setting_differences(group))
        for setting, first in group.groupby("setting").first().iterrows():
            name = str(setting)
            if len(keys) == 1:
                text = value_text(keys[0], first[keys[0]])
                labels[name] = f"without {keys[0]}" if text == ABSENT else f"{keys[0]}={text}"
            else:
                labels[name] = name.partition("#")[2] if keys else ""
    return labels
