"""Reads and keeps the rows of claim C1: moments of the true gradient, per policy, prompt, estimator and group size."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from filelock import FileLock

from otb.files import write_atomically
from otb.laboratory.statistics import MOMENTS, estimator_statistics

POLICY = ("task", "seed", "stage")  # seed: of the warm start
COLUMNS = (*POLICY, "prompt", "estimator", "group_size", *MOMENTS)


def measured(file: Path) -> set[tuple]:
    """Returns the policies (task, seed, stage) that have rows in a file; none where there is no file."""
    if not file.exists():
        return set()
    return set(pd.read_csv(file, usecols=list(POLICY))[list(POLICY)].itertuples(index=False, name=None))


def add(moments: pd.DataFrame, policy: tuple[str, int, str], file: Path) -> None:
    """Adds the moments of a policy, as experiments/variance.py wrote them, unless it has rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock")):
        if tuple(policy) in measured(file):
            return
        task, seed, stage = policy
        new = moments.assign(task=task, seed=seed, stage=stage)[list(COLUMNS)]
        both = pd.concat([pd.read_csv(file), new]) if file.exists() else new
        both = both.sort_values(list(COLUMNS[:6]))
        write_atomically(file, both.to_csv(index=False, float_format="%.5g"))


def relative_noise(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns `estimator_statistics` of each task and stage, its prompts pooled over the policies.

    rows: of one file. -> columns task, stage, policies, by_policy (the relative noise of each policy by itself, a
    tuple), and those of otb.laboratory.statistics.
    """
    parts = []
    for (task, stage), part in rows.groupby(["task", "stage"], sort=False):
        pooled = part.assign(prompt=part.seed.astype(str) + "/" + part.prompt.astype(str))
        found = estimator_statistics(pooled).assign(task=str(task), stage=str(stage), policies=part.seed.nunique())
        alone = pd.concat([estimator_statistics(policy) for _, policy in part.groupby("seed")])
        by_policy = alone.groupby(["estimator", "group_size"]).relative_noise.agg(tuple).rename("by_policy")
        parts.append(found.join(by_policy, on=["estimator", "group_size"]))
    return pd.concat(parts, ignore_index=True)
