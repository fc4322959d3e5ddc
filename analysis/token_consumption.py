"""Measures own tokens until a target accuracy, as a censored quantity, and the saving of one arm against another.

A run that never reaches the target is censored at the tokens it consumed, never dropped. One that diverged or
collapsed (analysis/stability.py) before it got there never will: it counts as short of the target however far one
looks, or the few tokens of a run that broke early would speak for its arm. Per arm: the Kaplan-Meier curve of runs
still short of the target, and its area up to the horizon, the restricted mean tokens-to-target. The horizon is the
largest consumption at which both arms are still observed, so an arm with the larger budget gains nothing by it. Where
that lies before any run of the rival arrives, the saving is a lower bound (`is_lower_bound`), and only there.

Runs end after equally many steps, so one of long responses is censored at more tokens, while Kaplan-Meier takes
censoring for unrelated to when a run would have arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from analysis.by_run import by_run
from analysis.checks import one_setting, require
from analysis.intervals import Interval, iqm, two_arms
from analysis.stability import collapse_step
from otb.errors import RunError

# What tells how far a run got and with how many tokens; accuracy and outcome, where there are any, whether it broke.
PROGRESS_COLUMNS = ("evaluation_accuracy", "evaluation_own_tokens_total", "own_tokens_total", "accuracy", "outcome")


class Consumption(NamedTuple):
    """The tokens of one arm, an entry per run: until the target, or until the end where `reached` is False.

    They are infinite for a run that broke before it got there.
    """

    seeds: NDArray
    tokens: NDArray
    reached: NDArray


def tokens_to_target(name: str, run: dict[str, NDArray], target: float) -> tuple[float, bool]:
    """Returns (own tokens, reached) of one run, linear between the evaluations around the target.

    A run that did not get there counts the tokens up to its last row, and infinitely many if it broke. Raises RunError
    where it was never evaluated.

    Args:
        name: of the run, for the error.
        run: evaluation_accuracy, evaluation_own_tokens_total, and what there is of own_tokens_total, accuracy and
            outcome, of `by_run`.
        target: accuracy.
    """
    accuracy, tokens = run["evaluation_accuracy"], run["evaluation_own_tokens_total"]
    evaluated = ~np.isnan(accuracy) & ~np.isnan(tokens)
    if not evaluated.any():
        raise RunError(f"{name} has no evaluation with accuracy and tokens. Set evaluation.every and resume.")
    accuracy, tokens = accuracy[evaluated], tokens[evaluated]
    hits = np.flatnonzero(accuracy >= target)
    if len(hits) == 0:
        return np.inf if broke(run) else float(np.nanmax([tokens[-1], *run.get("own_tokens_total", ())])), False
    i = hits[0]
    if i == 0:
        return float(tokens[0]), True
    part = (target - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
    return float(tokens[i - 1] + part * (tokens[i] - tokens[i - 1])), True


def broke(run: dict[str, NDArray]) -> bool:
    """Tells whether a run diverged or collapsed; without training accuracy by its evaluations.

    run: as in `tokens_to_target`.
    """
    accuracy = next(
        run[name] for name in ("accuracy", "evaluation_accuracy") if name in run and not np.isnan(run[name]).all()
    )
    diverged = bool(len(run.get("outcome", ())) and run["outcome"][0] == "diverged")
    return collapse_step(accuracy[~np.isnan(accuracy)], diverged) is not None


def consumption(arm: pd.DataFrame, target: float) -> Consumption:
    """Returns the consumption of one arm. arm: the rows of all its runs."""
    columns = ["seed", *(column for column in PROGRESS_COLUMNS if column in arm)]
    runs = [(run["seed"][0], *tokens_to_target(name, run, target)) for name, run in by_run(arm, *columns)]
    seeds, tokens, reached = (np.array(column) for column in zip(*runs, strict=True))
    return Consumption(seeds, tokens.astype(float), reached.astype(bool))


def restricted_mean(tokens: NDArray, reached: NDArray, horizon: float) -> NDArray:
    """Returns the area under the Kaplan-Meier curve up to `horizon`.

    Without censored runs that is the mean of min(tokens, horizon). It is written out, for many samples at once, because
    scipy.stats.ecdf takes one sample and the bootstrap would call it thousands of times.

    Args:
        tokens: (runs, ...).
        reached: (runs, ...) bool; False is censored.
        horizon: tokens.

    Returns:
        Mean tokens (...).
    """
    order = np.lexsort((~reached, tokens), axis=0)  # of equally many tokens those that reach the target come first
    tokens, reached = (np.take_along_axis(part, order, axis=0) for part in (tokens, reached))
    at_risk = np.arange(len(tokens), 0, -1).reshape(-1, *[1] * (tokens.ndim - 1))
    short = np.cumprod(np.where(reached, 1 - 1 / at_risk, 1.0), axis=0)  # share still short of the target after each
    before = np.concatenate([np.ones_like(short[:1]), short])
    ends = np.minimum(tokens, horizon)
    edges = np.concatenate([np.zeros_like(ends[:1]), ends, np.full_like(ends[:1], horizon)])
    return (np.diff(edges, axis=0) * before).sum(axis=0)


def censored(arm: Consumption) -> stats.CensoredData:
    """Returns the tokens of an arm as scipy takes them."""
    return stats.CensoredData.right_censored(np.nan_to_num(arm.tokens), ~arm.reached)  # which takes no infinity


def median_tokens(arm: Consumption) -> float:
    """Returns the tokens at which half of the runs have reached the target; NaN where more than half never do."""
    short = stats.ecdf(censored(arm)).sf
    below = np.flatnonzero(short.probabilities <= 0.5)
    return float(short.quantiles[below[0]]) if len(below) else np.nan


def horizon(*arms: Consumption) -> float:
    """Returns the largest consumption at which every arm is observed; NaN where all runs broke.

    An arm whose runs all arrived or broke is observed at any.
    """
    shared = min(observed(arm) for arm in arms)
    known = np.concatenate([arm.tokens[np.isfinite(arm.tokens)] for arm in arms])
    return float(shared if np.isfinite(shared) else known.max()) if len(known) else np.nan


def observed(arm: Consumption) -> float:
    """Returns up to how many tokens an arm is observed: until its last run, infinitely if that one arrived."""
    ends = np.isfinite(arm.tokens)
    if not ends.any():
        return np.inf
    last = arm.tokens[ends].max()
    return np.inf if arm.reached[arm.tokens == last].all() else float(last)


def saving(ours: Consumption, theirs: Consumption, **options) -> Interval:
    """Returns 1 - restricted mean of ours / that of theirs, paired over shared seeds; 0.62 is 62 % fewer tokens.

    The interval is that of the log ratio, which is nearer to symmetric. The estimate is NaN where no run of either arm
    reaches the target: nothing can be said.
    """
    if not ours.reached.any() and not theirs.reached.any():
        return Interval(np.nan, np.nan, np.nan, min(len(ours.seeds), len(theirs.seeds)))
    limit = horizon(ours, theirs)
    by_seed = [{seed: (tokens, hit) for seed, tokens, hit in zip(*arm, strict=True)} for arm in (ours, theirs)]

    def log_ratio(a: NDArray, b: NDArray) -> NDArray:
        means = [restricted_mean(runs[..., 0], runs[..., 1] > 0, limit) for runs in (a, b)]
        first, second = (np.log(np.where(mean > 0, mean, np.nan)) for mean in means)  # 0: nothing had to be learned
        return first - second

    logs = two_arms(by_seed[0], by_seed[1], log_ratio, **options)
    return as_saving(logs)


def as_saving(logs: Interval) -> Interval:
    """Returns 1 - ratio, from the logarithm of the ratio."""
    return Interval(1 - np.exp(logs.estimate), 1 - np.exp(logs.high), 1 - np.exp(logs.low), logs.seeds)


def arrives(arm: Consumption, limit: float) -> bool:
    """Tells whether any run of an arm reaches the target with at most `limit` tokens."""
    return bool((arm.tokens[arm.reached] <= limit).any())


def is_lower_bound(ours: Consumption, theirs: Consumption) -> bool:
    """Tells whether `saving` is a lower bound alone: it is cut off before any run of theirs reaches the target."""
    return not arrives(theirs, horizon(ours, theirs))


def median_saving(ours: Consumption, theirs: Consumption, **options) -> Interval:
    """Returns 1 - median tokens of ours / those of theirs, paired over shared seeds; 0.62 is 62 % fewer tokens.

    A run that never arrives counts as one that takes the most, so that a few of them cut nothing off. The median is the
    lower one of an even number of runs, as that of `median_tokens`; NaN where more than half of an arm do not arrive.
    """
    by_seed = [dict(zip(arm.seeds, np.where(arm.reached, arm.tokens, np.inf), strict=True)) for arm in (ours, theirs)]

    def log_ratio(a: NDArray, b: NDArray) -> NDArray:
        first, second = (np.sort(runs, axis=0)[(len(runs) - 1) // 2] for runs in (a, b))
        with np.errstate(invalid="ignore"):  # infinite minus infinite
            return np.log(first) - np.log(second)

    logs = two_arms(by_seed[0], by_seed[1], log_ratio, **options)
    if not np.isfinite(logs.estimate):
        return Interval(np.nan, np.nan, np.nan, logs.seeds)
    return as_saving(logs)


def log_rank(ours: Consumption, theirs: Consumption) -> float:
    """Returns the two-sided p of the log-rank test that both arms reach the target alike (asymptotic; unpaired)."""
    if not (ours.reached.any() or theirs.reached.any()):
        return np.nan
    return float(stats.logrank(censored(ours), censored(theirs)).pvalue)


def default_target(table: pd.DataFrame) -> float:
    """Returns the accuracy nine tenths of the way from the start to what the weakest arm holds at the end, to 0.01.

    The weakest, so that most runs of every arm get there and few are censored; one target serves all arms.
    """
    one_setting(table)
    require(table, "evaluation_accuracy")
    rows = table[table.evaluation_accuracy.notna()].sort_values("step")
    start = rows.groupby("run", observed=True).evaluation_accuracy.first().mean()
    last = rows.groupby(["arm", "run"], observed=True).evaluation_accuracy.last()
    weakest = last.groupby("arm", observed=True).agg(lambda values: float(iqm(values))).min()
    return round(float(start + 0.9 * (weakest - start)), 2)
