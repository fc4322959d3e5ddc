"""Reads and keeps the rows of claim C1: moments of the true gradient, per policy, prompt, estimator and group size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from filelock import FileLock

from analysis.intervals import stretch
from otb.errors import RunError
from otb.files import write_atomically
from otb.laboratory.statistics import MOMENTS, estimator_statistics

POLICY = ("task", "seed", "stage")  # seed: of the warm start
RESAMPLES = 20_000  # of intervals over prompts
POSITIVE = ("noise", "relative_noise", "over_probe")  # statistics
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

    All policies are measured on the same prompts, so that a prompt is resampled with what every policy makes of it;
    intervals are stretched for the number of prompts (analysis/intervals.py).

    rows: of one file. -> columns task, stage, policies, by_policy (the relative noise of each policy by itself, a
    tuple), and those of otb.laboratory.statistics. Raises RunError where a policy lacks a prompt that another has.
    """
    parts = []
    for (task, stage), part in rows.groupby(["task", "stage"], sort=False):
        policies = part.seed.nunique()
        by_prompt = part.groupby(["estimator", "group_size", "prompt"], sort=False)[list(MOMENTS)]
        if (by_prompt.size() != policies).any():
            raise RunError(f"The policies of C1 on {task} at {stage} were not measured on the same prompts.")
        found = stretched(estimator_statistics(by_prompt.mean().reset_index(), resamples=RESAMPLES))
        alone = pd.concat([estimator_statistics(policy, resamples=0) for _, policy in part.groupby("seed")])
        by_policy = alone.groupby(["estimator", "group_size"]).relative_noise.agg(tuple).rename("by_policy")
        found = found.assign(task=str(task), stage=str(stage), policies=policies)
        parts.append(found.join(by_policy, on=["estimator", "group_size"]))
    return pd.concat(parts, ignore_index=True)


def stretched(statistics: pd.DataFrame) -> pd.DataFrame:
    """Returns statistics of estimators with their intervals stretched for the number of prompts.

    Those of noise and its ratios on the logarithm, so that they stay above 0.

    statistics: columns prompts and those with `_low` and `_high` beside them.
    """
    widened = statistics.copy()
    n = int(statistics.prompts.iloc[0])
    for name in (column.removesuffix("_low") for column in map(str, statistics) if column.endswith("_low")):
        interval = [f"{name}_low", f"{name}_high"]
        value, ends = statistics[name].to_numpy(), statistics[interval].to_numpy().T
        wide = np.exp(stretch(np.log(value), np.log(ends), n)) if name in POSITIVE else stretch(value, ends, n)
        widened[interval] = wide.T
    return widened
