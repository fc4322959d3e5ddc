"""Defines collapse, gradient-norm surges and drawdown, here alone, and draws the stability figure (C2).

*Collapsed*: the run diverged (it was stopped because its loss or gradient was not finite), or the trailing mean of its
training accuracy over `WINDOW` steps fell below half of the highest it had reached and stayed there to the end. It
collapsed at the first step of that stay. *Surge*: a step whose gradient norm exceeds `SURGE` times the median of the
`WINDOW` steps before it. *Drawdown*: how far the trailing mean lies below its highest so far, in points of accuracy.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.arms import by_arm, colour
from analysis.by_run import by_run
from analysis.checks import one_setting, require
from analysis.intervals import FEWEST, wilson
from analysis.style import PAGE, dash, figure, interval_text, keep_numbers, legend_below, seeds_text
from analysis.ticks import whole_numbers

WINDOW = 10
SURGE = 5.0
KEPT_SHARE = 0.5


def trailing_mean(values: NDArray) -> NDArray:
    """Returns the mean of the last WINDOW values at each step; of fewer at the first steps."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def collapse_step(accuracy: NDArray, diverged: bool = False) -> int | None:
    """Returns the index of the step at which a run collapsed; None while it lives. accuracy: per step, in [0, 1]."""
    if len(accuracy) == 0:
        return 0 if diverged else None
    level = trailing_mean(accuracy)
    fallen = level < KEPT_SHARE * np.maximum.accumulate(level)
    if fallen[-1]:
        alive = np.flatnonzero(~fallen)
        return int(alive[-1] + 1)
    return len(accuracy) - 1 if diverged else None


def drawdown(accuracy: NDArray) -> NDArray:
    """Returns points of accuracy below the highest trailing mean so far, per step."""
    level = trailing_mean(accuracy)
    return np.maximum.accumulate(level) - level


def surges(gradient_norm: NDArray) -> NDArray:
    """Tells which steps are surges, bool per step.

    A norm that is not finite is a surge; otherwise the first WINDOW steps have nothing to be compared with.
    """
    surge = ~np.isfinite(gradient_norm)
    if len(gradient_norm) > WINDOW:
        before = np.lib.stride_tricks.sliding_window_view(gradient_norm, WINDOW)[:-1]
        surge[WINDOW:] |= gradient_norm[WINDOW:] > SURGE * np.median(before, axis=1)
    return surge


def stability_table(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run: collapsed_at (step or NaN), collapsed, surge_share, worst_drawdown, last_step."""
    score = "accuracy" if "accuracy" in table and table.accuracy.notna().any() else "reward_mean"
    require(table, score, "gradient_norm")
    rows = []
    for name, run in by_run(table, "step", "baseline", "group_size", "seed", "outcome", score, "gradient_norm"):
        scored = ~np.isnan(run[score])
        scores, norms = run[score][scored], run["gradient_norm"][~np.isnan(run["gradient_norm"])]
        at = collapse_step(scores, run["outcome"][0] == "diverged")
        step = np.nan if at is None else run["step"][scored][at] if len(scores) else 0
        worst = drawdown(scores).max() if len(scores) else np.nan
        facts = {"run": name} | {key: run[key][0] for key in ("baseline", "group_size", "seed")}
        facts |= {"collapsed_at": step, "collapsed": at is not None}
        facts |= {"surge_share": surges(norms).mean() if len(norms) else np.nan, "worst_drawdown": worst}
        rows.append(facts | {"last_step": run["step"][-1]})
    return pd.DataFrame(rows)


def survivors(runs: pd.DataFrame, last_step: int) -> tuple[NDArray, NDArray, NDArray]:
    """Returns the share of runs alive at steps 0 to `last_step`, and the ends of its Wilson interval.

    runs: of one arm, as `stability_table` returns them.
    """
    counts = [int((~(runs.collapsed_at <= step)).sum()) for step in range(last_step + 1)]
    low, high = np.array([wilson(count, len(runs)) for count in counts]).T
    return np.array(counts) / len(runs), low, high


def stability(table: pd.DataFrame):
    """Draws the share of seeds alive over steps (Wilson interval), the share of steps with a surge, the worst drawdown.

    Returns:
        The three axes.
    """
    runs = stability_table(one_setting(table))
    _, (alive, surge, worst) = figure(3, PAGE, 2.9, width_ratios=[1.4, 1, 1])
    plotted, names, sizes, shift = [], [], set(runs.group_size), 0.0
    for place, (baseline, size, text, arm) in enumerate(by_arm(runs)):
        tint, style, n = colour(baseline), dash(size, sizes), len(arm)
        share, low, high = survivors(arm, int(runs.last_step.max()))
        shift = 0.006 * place  # lines of arms that all live would hide each other
        alive.step(range(len(share)), share - shift, where="post", color=tint, ls=style, label=f"{text} ({n})")
        if n >= FEWEST:
            alive.fill_between(range(len(share)), low, high, step="post", color=tint, alpha=0.08, lw=0)
        names.append(text)
        for axes, column in ((surge, "surge_share"), (worst, "worst_drawdown")):
            spread = np.linspace(-0.15, 0.15, n) if n > 1 else [0]
            axes.plot(place + np.asarray(spread), arm[column], "o", color=tint, ms=3, alpha=0.7, clip_on=False)
        plotted.append(arm)
    alive.set(xlabel="step", ylabel="share of seeds alive", ylim=(-0.03, 1.03))
    whole_numbers(alive.xaxis)
    seeds = [len(part) for part in plotted]
    alive.set_title(f"{seeds_text(seeds)} per arm{interval_text(seeds)} (Wilson)", loc="left", fontsize=7)
    legend_below(alive)
    for axes, what, column in (
        (surge, "steps with a surge (share)", "surge_share"),
        (worst, "worst drawdown", "worst_drawdown"),
    ):
        highest = runs[column].max()
        axes.set(ylabel=what, xticks=range(len(names)), ylim=(0, 1.1 * highest if highest > 0 else 0.1))
        axes.set_xticklabels(names, rotation=60, ha="right")
        axes.set_title("a point per seed", loc="left", fontsize=7)
    keep_numbers(alive, pd.concat(plotted))
    return alive, surge, worst
