"""Tabulates and draws held-out accuracy against the group size N per baseline (C3)."""

from __future__ import annotations

import pandas as pd

from analysis.arms import by_arm, colour, label, marker
from analysis.checks import one_setting, require, require_grid
from analysis.intervals import RESAMPLES, bootstrap, iqm
from analysis.style import figure, keep_numbers, legend_below, seeds_text

LAST = 2  # evaluations averaged at the end: half the noise of the last one alone


def final_accuracy(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run: final (mean accuracy of its last two evaluations), best, mean over training, first.

    A diverged run ends with the policy it had: its last evaluations count.
    """
    require(one_setting(table), "evaluation_accuracy")
    rows = table[table.evaluation_accuracy.notna()].sort_values(["run", "step"])
    groups = rows.groupby(["run", "baseline", "group_size", "seed"], observed=True).evaluation_accuracy
    accuracies = groups.agg(first="first", best="max", mean="mean", final=lambda values: values.iloc[-LAST:].mean())
    return accuracies.reset_index()


def by_seed(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Returns seed -> value, for the paired comparisons of analysis/intervals.py."""
    return dict(zip(rows.seed, rows[column].astype(float), strict=True))


def accuracy_by_group_size(
    table: pd.DataFrame, value: str = "final", whole_grid: bool = True, resamples: int = RESAMPLES
):
    """Draws final accuracy over N per baseline: interquartile mean, 95 % interval, a point per seed.

    Args:
        table: rows of one setting.
        value: "final", "best" or "mean" of `final_accuracy`.
        whole_grid: whether every baseline must have been run at every size; if not, what there is is drawn.
        resamples: of the intervals.

    Returns:
        The axes.

    Raises:
        RunError: a cell of baselines x sizes is missing from a whole grid.
    """
    runs = final_accuracy(table)
    cells = {(b, int(n)) for b, n in zip(runs.baseline, runs.group_size, strict=True)}
    sizes = sorted({n for _, n in cells})
    if whole_grid:
        require_grid(cells, sorted({b for b, _ in cells}), sizes)
    _, axes = figure()
    plotted = []
    baselines = list(dict.fromkeys(base for base, *_ in by_arm(runs)))
    apart = min(0.1, 0.8 / len(baselines))  # octaves: intervals side by side on the logarithmic axis
    for place, baseline in enumerate(baselines):
        points = []
        shift = 2 ** (apart * (place - (len(baselines) - 1) / 2))
        for size in [size for size in sizes if (baseline, size) in cells]:
            values = runs[(runs.baseline == baseline) & (runs.group_size == size)][value].to_numpy()
            interval = bootstrap([values], iqm, resamples=resamples, bounds=(0, 1))
            points.append({"baseline": baseline, "group_size": size, **interval._asdict()})
            axes.plot([size * shift] * len(values), values, ".", ms=2, color=colour(baseline), alpha=0.5)
        frame = pd.DataFrame(points)
        at = frame.group_size * shift
        axes.plot(at, frame.estimate, color=colour(baseline), marker=marker(baseline), label=label(baseline))
        axes.vlines(at, frame.low, frame.high, color=colour(baseline), lw=0.9)
        plotted.append(frame)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="group size N", ylabel=f"{value} held-out accuracy", xticks=sizes, xticklabels=sizes)
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    axes.minorticks_off()
    counts = pd.concat(plotted).seeds
    axes.set_title(f"{seeds_text(counts)} per point; bars: 95 % interval", loc="left", fontsize=7)
    legend_below(axes)
    keep_numbers(axes, pd.concat(plotted))
    return axes
