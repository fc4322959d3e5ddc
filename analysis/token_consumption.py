"""Own tokens until a target accuracy, as a censored quantity; the saving of one arm against another; their figure.

A run that never reaches the target is censored at the tokens it consumed, never dropped. Per arm: the Kaplan-Meier
curve of runs still short of the target, and its area up to the horizon, the restricted mean tokens-to-target. The
horizon is the largest consumption at which both arms are still observed, so an arm with the larger budget gains nothing
by it. Where the rival is censored, the saving is a lower bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.arms import one_setting, require
from analysis.intervals import Interval, iqm, two_arms
from otb.errors import RunError


class Consumption(NamedTuple):
    """Of one arm, a row per run. tokens: until the target, or until the end where `reached` is False."""

    seeds: NDArray
    tokens: NDArray
    reached: NDArray


def tokens_to_target(run: pd.DataFrame, target: float) -> tuple[float, bool]:
    """(own tokens, reached) of one run: linear between the last evaluation below the target and the first at it.

    A diverged or unfinished run counts the tokens up to its last row.
    """
    evaluated = run[run.evaluation_accuracy.notna() & run.evaluation_own_tokens_total.notna()].sort_values("step")
    if evaluated.empty:
        raise RunError(
            f"{run.run.iloc[0]} has no evaluation with accuracy and tokens. Set evaluation.every and resume."
        )
    accuracy = evaluated.evaluation_accuracy.to_numpy()
    tokens = evaluated.evaluation_own_tokens_total.to_numpy()
    hits = np.flatnonzero(accuracy >= target)
    if len(hits) == 0:
        spent = run.own_tokens_total.max() if "own_tokens_total" in run else np.nan
        return float(np.nanmax([tokens[-1], spent])), False
    i = hits[0]
    if i == 0:
        return float(tokens[0]), True
    part = (target - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
    return float(tokens[i - 1] + part * (tokens[i] - tokens[i - 1])), True


def consumption(arm: pd.DataFrame, target: float) -> Consumption:
    """arm: the rows of every run of one arm."""
    runs = [(run.seed.iloc[0], *tokens_to_target(run, target)) for _, run in arm.groupby("run", observed=True)]
    seeds, tokens, reached = (np.array(column) for column in zip(*runs, strict=True))
    return Consumption(seeds, tokens.astype(float), reached.astype(bool))


def kaplan_meier(tokens: NDArray, reached: NDArray) -> tuple[NDArray, NDArray]:
    """(tokens of the drops, share still short of the target after each)."""
    times = np.unique(tokens[reached])
    at_risk = (tokens[None, :] >= times[:, None]).sum(1)
    events = ((tokens[None, :] == times[:, None]) & reached[None, :]).sum(1)
    return times, np.cumprod(1 - events / at_risk) if len(times) else np.empty(0)


def restricted_mean(tokens: NDArray, reached: NDArray, horizon: float) -> float:
    """Area under the Kaplan-Meier curve up to `horizon`; without censored runs the mean of min(tokens, horizon)."""
    times, short = kaplan_meier(tokens, reached)
    inside = times < horizon
    edges = np.concatenate([[0.0], times[inside], [horizon]])
    return float((np.diff(edges) * np.concatenate([[1.0], short[inside]])).sum())


def median_tokens(arm: Consumption) -> float:
    """Tokens at which half of the runs have reached the target; NaN where the curve stays above one half."""
    times, short = kaplan_meier(arm.tokens, arm.reached)
    below = np.flatnonzero(short <= 0.5)
    return float(times[below[0]]) if len(below) else np.nan


def horizon(*arms: Consumption) -> float:
    """The largest consumption at which every arm is observed; one whose runs all arrived always is."""
    ends = [arm.tokens.max() if not arm.reached[arm.tokens == arm.tokens.max()].all() else np.inf for arm in arms]
    shared = min(ends)
    return float(shared if np.isfinite(shared) else max(arm.tokens.max() for arm in arms))


def saving(ours: Consumption, theirs: Consumption, **options) -> Interval:
    """1 - restricted mean of ours / that of theirs, paired over shared seeds; 0.62 = 62 % fewer tokens.

    The interval is that of the log ratio, which is nearer to symmetric. estimate is NaN where no run of either arm
    reaches the target: nothing can be said.
    """
    if not ours.reached.any() and not theirs.reached.any():
        return Interval(np.nan, np.nan, np.nan, min(len(ours.seeds), len(theirs.seeds)))
    limit = horizon(ours, theirs)
    runs = [{seed: (tokens, hit) for seed, tokens, hit in zip(*arm, strict=True)} for arm in (ours, theirs)]

    def log_ratio(a: NDArray, b: NDArray) -> float:
        means = [restricted_mean(x[:, 0], x[:, 1] > 0, limit) for x in (a, b)]
        return float(np.log(means[0] / means[1])) if min(means) > 0 else np.nan

    found = two_arms(*runs, log_ratio, **options)
    return Interval(1 - np.exp(found.estimate), 1 - np.exp(found.high), 1 - np.exp(found.low), found.seeds)


def log_rank(ours: Consumption, theirs: Consumption) -> float:
    """Two-sided p of the log-rank test that both arms reach the target alike (scipy, asymptotic; unpaired)."""
    if not (ours.reached.any() or theirs.reached.any()):
        return np.nan
    samples = [stats.CensoredData.right_censored(arm.tokens, ~arm.reached) for arm in (ours, theirs)]
    return float(stats.logrank(*samples).pvalue)


def default_target(table: pd.DataFrame) -> float:
    """The accuracy nine tenths of the way from the start to what the weakest arm holds at the end, to 0.01.

    The weakest, so that most runs of every arm get there and few are censored; one target serves all arms.
    """
    one_setting(table)
    require(table, "evaluation_accuracy")
    rows = table[table.evaluation_accuracy.notna()].sort_values("step")
    start = rows.groupby("run", observed=True).evaluation_accuracy.first().mean()
    last = rows.groupby(["arm", "run"], observed=True).evaluation_accuracy.last()
    weakest = last.groupby("arm", observed=True).agg(lambda values: float(iqm(values))).min()
    return round(float(start + 0.9 * (weakest - start)), 2)
