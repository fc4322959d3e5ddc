"""Curves of several seeds on one grid, and how an arm is drawn. Called by the figures; no smoothing anywhere."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from analysis.arms import one_setting, require, seeds_text
from analysis.intervals import curve_interval
from analysis.style import arms, colour, dash
from otb.errors import RunError
from otb.records import EVALUATION_METRICS, METRICS


def curve(run: pd.DataFrame, y: str, x: str) -> tuple[NDArray, NDArray]:
    """One run's measured points, ascending in x."""
    place = "evaluation_own_tokens_total" if x == "own_tokens_total" and y.startswith("evaluation_") else x
    rows = run[[place, y]].dropna().sort_values(place)
    return rows[place].to_numpy(float), rows[y].to_numpy(float)


def on_one_grid(runs: list[tuple[NDArray, NDArray]], ended: list[bool], shared_steps: bool) -> tuple[NDArray, NDArray]:
    """Points of several seeds -> (grid, values (seeds, points)).

    ended: a diverged run, which keeps its last value; leaving it out would make the others look better. Over steps the
    grid holds the steps that every other run measured; over tokens, where no two runs share a point, a seed's value is
    linear between its own points, on the range that all runs cover.
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


def arm_curves(rows: pd.DataFrame, y: str, x: str) -> list[tuple[str, NDArray, NDArray, bool]]:
    """(run, x, y, diverged) per run of an arm that measured y."""
    found = []
    for name, run in rows.groupby("run", observed=True):
        points = curve(run, y, x)
        if len(points[0]):
            found.append((name, *points, run.outcome.iloc[0] == "diverged"))
    return found


def draw_curves(
    axes, table: pd.DataFrame, y: str, x: str = "step", outside: pd.DataFrame | None = None, log: bool = False
) -> pd.DataFrame:
    """Draws every arm of `table` into axes, with a legend that states the seeds. -> the plotted numbers.

    log: for a positive quantity; mean and interval are those of its logarithm, and a value of 0 has no place.
    """
    if log and y in table:
        table = table.assign(**{y: table[y].where(table[y] > 0)})
        axes.set_yscale("log")
    require(one_setting(table), y)
    sizes, plotted, counts = set(table.group_size), [], []
    for baseline, size, text, rows in arms(table):
        runs = arm_curves(rows, y, x)
        if not runs:
            continue
        tint, style = colour(baseline), dash(size, sizes)
        for name, place, values, diverged in runs:
            (line,) = axes.plot(place, values, color=tint, ls=style, lw=0.6, alpha=0.35)
            line.set_gid(f"run:{name}")
            if diverged:
                axes.plot(place[-1:], values[-1:], "x", color=tint, ms=6)
        grid, values = on_one_grid([run[1:3] for run in runs], [run[3] for run in runs], x == "step")
        estimate, low, high = curve_interval(np.log(values) if log else values)
        if log:
            estimate, low, high = (None if part is None else np.exp(part) for part in (estimate, low, high))
        counts.append(len(runs))
        if low is not None:  # too few seeds: the raw lines alone
            low, high = (np.clip(part, 0, 1) if is_share(y) else part for part in (low, high))
            axes.fill_between(grid, low, high, color=tint, alpha=0.15, lw=0)
            axes.plot(grid, estimate, color=tint, ls=style, label=f"{text} ({len(runs)})")
        else:
            axes.plot([], [], color=tint, ls=style, lw=0.8, label=f"{text} ({len(runs)}, no interval)")
        plotted.append(_numbers(baseline, size, y, x, grid, (estimate, low, high), len(runs)))
    for name, run in () if outside is None or y not in outside else outside.groupby("run", observed=True):
        place, values = curve(run, y, x)
        if len(place):
            (line,) = axes.plot(place, values, color="0.45", ls="--", lw=0.9, label=f"TRL: {name}")
            line.set_gid(f"run:{name}")
            plotted.append(_numbers(f"TRL: {name}", np.nan, y, x, place, (values, None, None), 1))
    if not counts:
        raise RunError(f"No run measured {y} over {x}. Run again with the present version, which records both.")
    if x == "own_tokens_total":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_title(f"{seeds_text(counts)} per arm; band: 95 % interval", loc="left", fontsize=7)
    legend_below(axes)
    return pd.concat(plotted)


def is_share(metric: str) -> bool:
    """Whether a metric cannot leave [0, 1]."""
    known = EVALUATION_METRICS.get(metric.removeprefix("evaluation_")) if metric not in METRICS else METRICS[metric]
    return known is not None and known.unit == "share"


def legend_below(axes) -> None:
    """One legend per figure, outside the axes: curves fill them."""
    handles, names = axes.get_legend_handles_labels()
    if not axes.figure.legends:
        columns = 3 if axes.figure.get_figwidth() > 4 else 2
        axes.figure.legend(handles, names, loc="outside lower center", ncols=columns, columnspacing=1.0)


def _numbers(baseline, size, y, x, grid, found, seeds) -> pd.DataFrame:
    estimate, low, high = (np.nan if part is None else part for part in found)
    columns = {"metric": y, "baseline": baseline, "group_size": size, x: grid, "estimate": estimate}
    return pd.DataFrame(columns | {"low": low, "high": high, "seeds": seeds})
