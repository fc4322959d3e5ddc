"""Computes 95 % intervals over seeds: interquartile mean, probability of improvement, stratified bootstrap.

A percentile bootstrap of 3 to 5 seeds covers the truth 73 to 90 % of the time, not 95 %. The bootstrap's quantiles are
therefore stretched about the estimate by t(n - 1) / 1.96 * sqrt(n / (n - 1)), n = seeds of the smallest stratum: for a
mean that is Student's interval, for large n the plain percentile interval (tests/analysis/test_analysis_statistics.py
measures the coverage). Fewer than `FEWEST` seeds give no interval. The notions come from rliable (Agarwal et al.
2021).

A *statistic* here reduces axis 0, the seeds, and keeps all others, as `iqm` and `np.mean` with axis=0 do: the bootstrap
hands it all resamples at once, as an array (seeds, resamples, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
FEWEST = 3
RESAMPLES = 2000
Statistic = Callable[..., Any]  # (seeds, ...) per stratum -> (...)


class Interval(NamedTuple):
    """An estimate and its interval; low and high are NaN where there are too few seeds for one."""

    estimate: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        text = f"{self.estimate:.3g}"
        return text if np.isnan(self.low) else f"{text} [{self.low:.3g}, {self.high:.3g}]"


def iqm(values: ArrayLike, axis: int = 0) -> Any:
    """Returns the interquartile mean: a quarter of the values is cut off at each end, in whole values.

    With fewer than 4 values it is the mean.

    Args:
        values: array (seeds, ...), or with the seeds on another axis.
        axis: the axis of the seeds.

    Returns:
        Array (...) without that axis; a number for one axis.
    """
    ordered = np.sort(np.moveaxis(np.asarray(values, float), axis, 0), axis=0)  # 3 times as fast as stats.trim_mean
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut].mean(axis=0)
    return np.where(np.isnan(ordered[-1]), np.nan, middle)[()]  # NaN is sorted to the end, and must not be cut off


def probability_of_improvement(ours: ArrayLike, theirs: ArrayLike) -> Any:
    """Returns P(a run of ours beats a run of theirs), ties counting half: the Mann-Whitney statistic over n m pairs.

    Args:
        ours: values of n runs, (n, ...).
        theirs: values of m runs, (m, ...).

    Returns:
        Probability (...).
    """
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    test = stats.mannwhitneyu(ours, theirs, method="asymptotic")  # the p-value, whose method this is, is not used
    return test.statistic / (len(ours) * len(theirs))


def bootstrap(
    strata: Sequence[ArrayLike],
    statistic: Statistic,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> Interval:
    """Returns a statistic with its bootstrap interval, each stratum's seeds resampled by themselves.

    Args:
        strata: arrays (seeds, ...), one per argument of the statistic. A paired statistic takes one stratum whose rows
            are seeds and whose columns are the two arms.
        statistic: from arrays (seeds, ...) to what is left without the first axis, see the top of the file.
        resamples: number of resamples; 0 gives the estimate alone.
        seed: of the resampling; the same seed gives the same interval.
        bounds: what the statistic cannot leave; the interval is cut there.

    Returns:
        Interval with the seeds of the smallest stratum. Resamples on which the statistic is not finite are dropped; if
        they are more than half, or the seeds fewer than `FEWEST`, low and high are NaN.

    Raises:
        ValueError: a stratum is empty, or the statistic does not keep the resamples apart.
    """
    arrays = [np.asarray(stratum, float) for stratum in strata]
    sizes = [len(array) for array in arrays]
    if 0 in sizes:
        raise ValueError("A stratum has no seed; an interval needs at least one in each.")
    n, estimate = min(sizes), float(statistic(*arrays))
    if n < FEWEST or not resamples:
        return Interval(estimate, np.nan, np.nan, n)
    chosen = resampled(tuple(sizes), resamples, seed)
    drawn = np.asarray(statistic(*(array[index] for array, index in zip(arrays, chosen, strict=True))))
    if drawn.shape != (resamples,):
        raise ValueError(f"The statistic returned {drawn.shape}, not one value per resample. Reduce axis 0 alone.")
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) <= resamples / 2 or not np.isfinite(estimate):
        return Interval(estimate, np.nan, np.nan, n)
    low, high = stretch(estimate, np.quantile(drawn, TAILS), n)
    return Interval(estimate, max(low, bounds[0]), min(high, bounds[1]), n)


@lru_cache(maxsize=16)
def resampled(sizes: tuple[int, ...], resamples: int, seed: int) -> list[NDArray]:
    """Returns the seeds that each resample takes, (seeds, resamples) per stratum: the same for all arms of a size."""
    each = np.repeat(sizes, sizes)
    drawn = np.random.default_rng(seed).integers(0, each, (resamples, len(each))).T
    return np.split(drawn, np.cumsum(sizes)[:-1])


def stretch(estimate: ArrayLike, quantiles: NDArray, n: int) -> NDArray:
    """Widens bootstrap quantiles to what few seeds need, see the top of the file.

    Args:
        estimate: (...).
        quantiles: (2, ...), low and high.
        n: number of seeds.

    Returns:
        (2, ...), low and high.
    """
    factor = stats.t.ppf(TAILS[1], n - 1) / stats.norm.ppf(TAILS[1]) * np.sqrt(n / (n - 1))
    return estimate + factor * (np.asarray(quantiles) - estimate)


def curve_interval(values: NDArray, *, resamples: int = 1000, seed: int = 0) -> tuple[NDArray, NDArray, NDArray]:
    """Returns the interquartile mean of curves and its pointwise interval.

    Args:
        values: (seeds, points).
        resamples: number of resamples, the same for all points.
        seed: of the resampling.

    Returns:
        estimate, low, high (points); low and high are NaN with fewer than `FEWEST` seeds.
    """
    values = np.asarray(values, float)
    n, points = values.shape
    estimate, low, high = iqm(values), np.full(points, np.nan), np.full(points, np.nan)
    if n < FEWEST:
        return estimate, low, high
    rows = np.random.default_rng(seed).integers(0, n, (resamples, n))
    width = max(1, 5_000_000 // (resamples * n))  # points at a time: 40 MB of resampled values
    for start in range(0, points, width):
        part = slice(start, start + width)
        drawn = np.quantile(iqm(values[rows, part], axis=1), TAILS, axis=0)
        low[part], high[part] = stretch(estimate[part], drawn, n)
    return estimate, low, high


def paired(ours: Mapping[int, Any], theirs: Mapping[int, Any]) -> tuple[list[NDArray], bool]:
    """Makes the strata of a comparison of two arms.

    Args:
        ours, theirs: seed -> value, a number or several.

    Returns:
        (strata, whether they are paired). Paired is one array (seeds, ..., 2) over the shared seeds; where fewer than
        `FEWEST` are shared, and not all, the two arms (seeds, ...) stand by themselves.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) >= FEWEST or set(ours) == set(theirs):
        return [np.stack([np.array([arm[seed] for seed in shared], float) for arm in (ours, theirs)], axis=-1)], True
    return [np.array(list(arm.values()), float) for arm in (ours, theirs)], False


def two_arms(ours: Mapping[int, Any], theirs: Mapping[int, Any], statistic: Statistic, **options) -> Interval:
    """Returns a statistic of two arms with its interval, paired over the seeds that both have.

    Args:
        ours, theirs: seed -> value, a number or several.
        statistic: from the values of ours and of theirs, (seeds, ...) each.
        options: of `bootstrap`.

    Returns:
        Interval.

    Raises:
        ValueError: an arm has no seed.
    """
    if not ours or not theirs:
        raise ValueError("An arm has no seed; a comparison needs at least one in each.")
    strata, is_paired = paired(ours, theirs)
    if is_paired:
        return bootstrap(strata, lambda both: statistic(both[..., 0], both[..., 1]), **options)
    return bootstrap(strata, statistic, **options)


def difference(ours: Mapping[int, float], theirs: Mapping[int, float], **options) -> Interval:
    """Returns the interquartile mean of ours - theirs: of the differences where paired, else that of the two means.

    Args:
        ours, theirs: seed -> value.
        options: of `bootstrap`.

    Returns:
        Interval.
    """
    strata, is_paired = paired(ours, theirs)
    if is_paired:
        return bootstrap([strata[0][:, 0] - strata[0][:, 1]], iqm, **options)
    return bootstrap(strata, lambda a, b: iqm(a) - iqm(b), **options)


@cache
def wilson(successes: int, n: int) -> tuple[float, float]:
    """Returns Wilson's interval of a share. Where no seed, or every seed, survives, a bootstrap would claim certainty.

    Args:
        successes: seeds that count.
        n: all seeds.

    Returns:
        low, high.
    """
    interval = stats.binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def improvement(ours: ArrayLike, theirs: ArrayLike, **options) -> Interval:
    """Returns `probability_of_improvement` with its interval, the arms resampled by themselves.

    Args:
        ours, theirs: values of the runs, (n) and (m).
        options: of `bootstrap`.

    Returns:
        Interval. Where every pair agrees no resample differs, and Wilson's interval of the smaller arm stands instead.
    """
    resampled = bootstrap([ours, theirs], probability_of_improvement, bounds=(0, 1), **options)
    if resampled.estimate in (0, 1) and not np.isnan(resampled.low):
        successes = int(resampled.estimate) * resampled.seeds
        return Interval(resampled.estimate, *wilson(successes, resampled.seeds), resampled.seeds)
    return resampled


def share_difference(ours: tuple[int, int], theirs: tuple[int, int]) -> Interval:
    """Returns the difference of two shares of seeds with Newcombe's interval (1998, method 10), made of two Wilson's.

    Args:
        ours, theirs: (seeds that count, all seeds).

    Returns:
        Interval of ours - theirs.
    """
    (a, n), (b, m) = ours, theirs
    p, q = a / n, b / m
    (p_low, p_high), (q_low, q_high) = wilson(a, n), wilson(b, m)
    low = p - q - np.hypot(p - p_low, q_high - q)
    high = p - q + np.hypot(p_high - p, q - q_low)
    few = min(n, m) < FEWEST
    return Interval(p - q, np.nan if few else float(low), np.nan if few else float(high), min(n, m))
