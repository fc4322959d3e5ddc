"""Puts the curves of several seeds on one grid and draws them per arm, without smoothing. Called by the figures.

Evaluations are markers, joined by straight lines: between two of them nothing was measured.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from analysis.arms import by_arm, colour
from analysis.by_run import by_run
from analysis.checks import one_setting, require
from analysis.intervals import FEWEST, curve_interval
from analysis.style import dash, interval_text, seeds_text
from analysis.ticks import plain_log, whole_numbers
from otb.errors import RunError
from otb.records.metric_names import EVALUATION_METRICS, METRICS

SEED_LINES = 100  # thin lines of one axes; more would hide each other, and the page would open slowly
MARKED = 60  # evaluations of a run, above which markers would run into a line
Curve = tuple[str, NDArray, NDArray, bool]  # run, x, y, diverged


def on_one_grid(runs: list[tuple[NDArray, NDArray]], ended: list[bool], shared_steps: bool) -> tuple[NDArray, NDArray]:
    """Puts the points of several seeds on one grid.

    Over steps the grid holds the steps that every run measured; over tokens, where no two runs share a point, a seed's
    value is linear between its own points, on the range that all runs cover.

    Args:
        runs: (x, y) per seed.
        ended: per seed, whether it diverged. It keeps its last value, and the grid does not end with it; leaving it out
            would make the others look better.
        shared_steps: whether x is the step.

    Returns:
        (grid (points), values (seeds, points)).
    """
    whole = [run for run, is_ended in zip(runs, ended, strict=True) if not is_ended] or runs
    if shared_steps:
        grid = whole[0][0]
        for x, _ in whole[1:]:
            grid = np.intersect1d(grid, x)
    else:
        low, high = max(run[0][0] for run in whole), min(run[0][-1] for run in whole)
        grid = np.unique(np.concatenate([run[0] for run in whole]))
        grid = grid[(grid >= low) & (grid <= high)]
    return grid, np.array([np.interp(grid, *run) for run in runs])


def curves_of(rows: pd.DataFrame, y: str, x: str) -> list[Curve]:
    """Returns (run, x, y, diverged) per run that measured y, ascending in x."""
    place = "evaluation_own_tokens_total" if x == "own_tokens_total" and y.startswith("evaluation_") else x
    curves = []
    for name, run in by_run(rows, place, y, "outcome"):
        at, values = run[place].astype(float), run[y].astype(float)
        measured = np.flatnonzero(~np.isnan(at) & ~np.isnan(values))
        order = measured[np.argsort(at[measured], kind="stable")]
        if len(order):
            curves.append((name, at[order], values[order], bool(run["outcome"][0] == "diverged")))
    return curves


def draw_curves(
    axes,
    table: pd.DataFrame,
    y: str,
    x: str = "step",
    outside: pd.DataFrame | None = None,
    log: bool = False,
    seed_lines: bool = True,
) -> pd.DataFrame:
    """Draws every arm of `table` into axes, with the seeds in their labels; a legend is put by the caller.

    Args:
        table: rows of one setting.
        y: the metric.
        x: "step" or "own_tokens_total".
        outside: rows of plain TRL runs, drawn as grey lines.
        log: for a positive quantity; mean and interval are those of its logarithm, and a value of 0 has no place.
        seed_lines: whether single seeds are drawn as thin lines.

    Returns:
        The plotted numbers.

    Raises:
        RunError: no run measured y, or settings are mixed.
    """
    if log and y in table:
        table = table.assign(**{y: table[y].where(table[y] > 0)})
        axes.set_yscale("log")
    require(one_setting(table), y)
    sizes, plotted, arms = set(table.group_size), [], by_arm(table)
    most = max(1, SEED_LINES // len(arms)) if seed_lines else 0
    for baseline, size, text, rows in arms:
        if runs := curves_of(rows, y, x):
            style = {"color": colour(baseline), "ls": dash(size, sizes)}
            numbers = draw_arm(axes, runs, text, style, most, x == "step", y, log)
            plotted.append(labelled(numbers, baseline, size, y, x))
    if not plotted:
        raise RunError(f"No run measured {y} over {x}. Run again with the present version, which records both.")
    counts = [int(numbers.seeds.iloc[0]) for numbers in plotted]
    for name, place, values, _ in () if outside is None or y not in outside else curves_of(outside, y, x):
        (line,) = axes.plot(place, values, color="0.45", ls="--", lw=0.9, label=f"TRL: {name}")
        line.set_gid(f"run:{name}")
        numbers = pd.DataFrame({"x": place, "estimate": values, "low": np.nan, "high": np.nan, "seeds": 1})
        plotted.append(labelled(numbers, f"TRL: {name}", np.nan, y, x))
    if x == "own_tokens_total":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        whole_numbers(axes.xaxis)
    if log:
        plain_log(axes.yaxis)
    drawn = f", {most} drawn" if max(counts) > most > 0 else ""
    axes.set_title(f"{seeds_text(counts)} per arm{drawn}{interval_text(counts)}", loc="left", fontsize=7)
    return pd.concat(plotted)


def draw_arm(
    axes, runs: list[Curve], text: str, style: dict, most: int, shared_steps: bool, y: str, log: bool
) -> pd.DataFrame:
    """Draws one arm: a thin line per seed, the mean and its band; the lines alone where the seeds are too few.

    Args:
        runs: of `curves_of`.
        text: the arm's name in the legend.
        style: colour and line style.
        most: seeds that are drawn as lines; the mean is over all of them.
        shared_steps, log: as in `on_one_grid` and `draw_curves`.
        y: the metric; evaluations get markers, and the interval of a share ends at 0 and 1.

    Returns:
        The mean and its interval: x, estimate, low, high, seeds.
    """
    marked = y.startswith("evaluation_") and max(len(run[1]) for run in runs) <= MARKED
    few = len(runs) < FEWEST
    mark = {"marker": "o" if marked and (few or most) else "", "ms": 2.5 if few else 1.5}
    for name, place, values, _ in runs[:most]:
        (line,) = axes.plot(place, values, **style, **mark, lw=0.9 if few else 0.7, alpha=0.8 if few else 0.5)
        line.set_gid(f"run:{name}")
    for _, place, values, diverged in runs:
        if diverged:
            axes.plot(place[-1:], values[-1:], "x", color=style["color"], ms=6)
    grid, values = on_one_grid([run[1:3] for run in runs], [run[3] for run in runs], shared_steps)
    estimate, low, high = curve_interval(np.log(values) if log else values)
    if log:
        estimate, low, high = np.exp(estimate), np.exp(low), np.exp(high)
    if is_share(y):
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    legend_text = f"{text} ({len(runs)})"
    if few:
        axes.plot([], [], **style, marker="o" if marked else "", ms=2.5, lw=0.9, label=legend_text)
    else:
        axes.fill_between(grid, low, high, color=style["color"], alpha=0.15, lw=0)
        axes.plot(grid, estimate, **style, lw=1.0 if marked else 1.3, label=legend_text, zorder=3)  # above all seeds
        if marked:
            at = mean_places(runs, grid)
            axes.plot(at, np.interp(at, grid, estimate), "o", color=style["color"], ms=3, zorder=3)
    return pd.DataFrame({"x": grid, "estimate": estimate, "low": low, "high": high, "seeds": len(runs)})


def mean_places(runs: list[Curve], grid: NDArray) -> NDArray:
    """Returns the mean place over seeds of the first evaluation, the second, ..., as far as it lies on the grid."""
    shortest = min(len(run[1]) for run in runs)
    places = np.mean([run[1][:shortest] for run in runs], axis=0)
    return places[(places >= grid[0]) & (places <= grid[-1])] if len(grid) else places[:0]


def labelled(numbers: pd.DataFrame, baseline: str, size: float, y: str, x: str) -> pd.DataFrame:
    """Returns plotted numbers as they are saved: metric, baseline and group size first, the column x by its name."""
    first = pd.DataFrame({"metric": y, "baseline": baseline, "group_size": size}, index=numbers.index)
    return pd.concat([first, numbers.rename(columns={"x": x})], axis=1)


def is_share(metric: str) -> bool:
    """Tells whether a metric cannot leave [0, 1]."""
    known = EVALUATION_METRICS.get(metric.removeprefix("evaluation_")) if metric not in METRICS else METRICS[metric]
    return known is not None and known.unit == "share"
