"""95 % intervals over seeds: interquartile mean, probability of improvement, stratified bootstrap. Pure functions.

A percentile bootstrap of 3 to 5 seeds covers the truth 73 to 90 % of the time, not 95 %. The bootstrap's quantiles are
therefore stretched about the estimate by t(n - 1) / 1.96 * sqrt(n / (n - 1)), n = seeds of the smallest stratum: for a
mean that is Student's interval, for large n the plain percentile interval (tests/test_analysis_intervals.py measures
the coverage). Fewer than `FEWEST` seeds give no interval. Notions after rliable (Agarwal et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
FEWEST = 3
RESAMPLES = 2000


class Interval(NamedTuple):
    """low and high are NaN where there are too few seeds for an interval."""

    estimate: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        shown = f"{self.estimate:.3g}"
        return shown if np.isnan(self.low) else f"{shown} [{self.low:.3g}, {self.high:.3g}]"


def iqm(values: ArrayLike, axis: int = 0) -> NDArray | float:
    """Interquartile mean: a quarter of the values is cut off at each end (whole values; below 4 it is the mean)."""
    ordered = np.moveaxis(np.sort(np.asarray(values, float), axis=axis), axis, 0)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean(axis=0)


def probability_of_improvement(ours: ArrayLike, theirs: ArrayLike) -> float:
    """P(a run of ours beats a run of theirs), ties counting half: the Mann-Whitney statistic over n m pairs."""
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    return float((np.sign(ours[:, None] - theirs[None, :]) + 1).mean() / 2)


def bootstrap(
    strata: Sequence[ArrayLike],
    statistic: Callable[..., float],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> Interval:
    """Interval of statistic(*strata), each stratum's seeds (its axis 0) resampled by themselves.

    For a paired statistic give one stratum whose rows are seeds and whose columns are the two arms. bounds: what the
    statistic cannot leave. Resamples on which the statistic is not finite are dropped; if more than half, no interval.
    """
    strata = [np.asarray(stratum, float) for stratum in strata]
    if any(len(stratum) == 0 for stratum in strata):
        raise ValueError("A stratum has no seed; an interval needs at least one in each.")
    n, estimate = min(map(len, strata)), float(statistic(*strata))
    if n < FEWEST or not resamples:
        return Interval(estimate, np.nan, np.nan, n)
    rng = np.random.default_rng(seed)
    drawn = np.array(
        [statistic(*(s[rng.integers(0, len(s), len(s))] for s in strata)) for _ in range(resamples)], float
    )
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) <= resamples / 2 or not np.isfinite(estimate):
        return Interval(estimate, np.nan, np.nan, n)
    low, high = stretch(estimate, np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), n)
    return Interval(estimate, max(low, bounds[0]), min(high, bounds[1]), n)


def stretch(estimate, quantiles: NDArray, n: int) -> NDArray:
    """Small-sample form of bootstrap quantiles, see the top of the file. quantiles (2, ...) -> (2, ...)."""
    factor = stats.t.ppf((1 + LEVEL) / 2, n - 1) / stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(n / (n - 1))
    return estimate + factor * (np.asarray(quantiles) - estimate)


def curve_interval(
    values: NDArray, *, resamples: int = 1000, seed: int = 0
) -> tuple[NDArray, NDArray | None, NDArray | None]:
    """Interquartile mean and pointwise interval of curves. values (seeds, points) -> estimate, low, high (points)."""
    values = np.asarray(values, float)
    n, points = values.shape
    estimate = iqm(values)
    if n < FEWEST:
        return estimate, None, None
    rows = np.random.default_rng(seed).integers(0, n, (resamples, n))
    low, high = np.empty(points), np.empty(points)
    width = max(1, 5_000_000 // (resamples * n))  # points at a time: 40 MB of resampled values
    for start in range(0, points, width):
        part = slice(start, start + width)
        drawn = np.quantile(iqm(values[rows, part], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        low[part], high[part] = stretch(estimate[part], drawn, n)
    return estimate, low, high


def paired(ours: dict[int, float], theirs: dict[int, float]) -> tuple[list[NDArray], bool]:
    """seed -> value of two arms -> strata: one (seeds, 2) array over the shared seeds, or, where fewer than `FEWEST`
    are shared, the two arms by themselves. The second value says whether it is paired."""
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) >= FEWEST or set(ours) == set(theirs):
        return [np.array([[ours[s], theirs[s]] for s in shared])], True
    return [np.array(list(ours.values())), np.array(list(theirs.values()))], False


def two_arms(
    ours: dict[int, float],
    theirs: dict[int, float],
    statistic: Callable[[NDArray, NDArray], float],
    **options,
) -> Interval:
    """Interval of statistic(values of ours, values of theirs), paired over the seeds that both have."""
    if not ours or not theirs:
        raise ValueError("An arm has no seed; a comparison needs at least one in each.")
    strata, is_paired = paired(ours, theirs)
    if is_paired:
        return bootstrap(strata, lambda both: statistic(both[:, 0], both[:, 1]), **options)
    return bootstrap(strata, statistic, **options)


def difference(ours: dict[int, float], theirs: dict[int, float], **options) -> Interval:
    """Interquartile mean of ours - theirs: of the differences where paired, else the difference of the two means."""
    strata, is_paired = paired(ours, theirs)
    if is_paired:
        return bootstrap([strata[0][:, 0] - strata[0][:, 1]], lambda d: float(iqm(d)), **options)
    return bootstrap(strata, lambda a, b: float(iqm(a) - iqm(b)), **options)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Interval of a share. Where no seed, or every seed, survives, a bootstrap would claim certainty; this does not."""
    z = stats.norm.ppf((1 + LEVEL) / 2)
    centre, half = successes + z * z / 2, z * np.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))


def improvement(ours: ArrayLike, theirs: ArrayLike, **options) -> Interval:
    """`probability_of_improvement` with its interval, the arms resampled by themselves: it compares all pairs of runs.

    Where every pair agrees no resample differs, and Wilson's interval of the smaller arm stands instead.
    """
    found = bootstrap([ours, theirs], probability_of_improvement, bounds=(0, 1), **options)
    if found.estimate in (0, 1) and not np.isnan(found.low):
        return Interval(found.estimate, *wilson(int(found.estimate) * found.seeds, found.seeds), found.seeds)
    return found


def share_difference(ours: tuple[int, int], theirs: tuple[int, int]) -> Interval:
    """Difference of two shares, (count, seeds) each: Newcombe's interval from the two Wilson intervals (method 10)."""
    (a, n), (b, m) = ours, theirs
    p, q = a / n, b / m
    (l1, u1), (l2, u2) = wilson(a, n), wilson(b, m)
    low = p - q - np.hypot(p - l1, u2 - q)
    high = p - q + np.hypot(u1 - p, q - l2)
    few = min(n, m) < FEWEST
    return Interval(p - q, np.nan if few else float(low), np.nan if few else float(high), min(n, m))
