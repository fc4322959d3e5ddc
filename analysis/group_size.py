"""Tabulates and draws held-out accuracy against the group size N per baseline (C3)."""

from __future__ import annotations

import pandas as pd

from analysis.arms import by_arm, colour, label, marker
from analysis.checks import one_setting, require, require_grid
from analysis.intervals import RESAMPLES, bootstrap, iqm
from analysis.style import figure, interval_text, keep_numbers, legend_below, seeds_text
from otb.errors import RunError

LAST = 2  # evaluations averaged at the end: half the noise of the last one alone


def final_accuracy(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run: final, best, mean and first accuracy, and how many evaluations `final` averages.

    final is the mean of the last `LAST` evaluations after step 0, or the only one; what was measured before training
    never counts. A run without an evaluation after step 0 has no row: its accuracy at the end was not measured. A
    diverged run ends with the policy it had: its last evaluations count. Raises RunError where no run has a final.
    """
    require(one_setting(table), "evaluation_accuracy")
    rows = table[table.evaluation_accuracy.notna()].sort_values(["run", "step"])
    keys = ["run", "baseline", "group_size", "seed"]
    whole = rows.groupby(keys, observed=True).evaluation_accuracy.agg(first="first", best="max", mean="mean")
    trained = rows[rows.step > 0].groupby(keys, observed=True).evaluation_accuracy
    ends = trained.agg(final=lambda values: values.iloc[-LAST:].mean(), averaged=lambda values: min(LAST, len(values)))
    if ends.empty:
        raise RunError("No run was evaluated after step 0, so no final accuracy is known. Set evaluation.every=10.")
    return whole.join(ends, how="inner").reset_index()


def final_words(runs: pd.DataFrame) -> str:
    """Returns what a final accuracy is, for a caption. runs: of `final_accuracy`."""
    if (runs.averaged == LAST).all():
        return "mean of the last two evaluations"
    if (runs.averaged < LAST).all():
        return "the only evaluation after step 0"
    return "mean of the last two evaluations; of the only one where a run has one after step 0"


def by_seed(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Returns seed -> value, for the paired comparisons of analysis/intervals.py."""
    return dict(zip(rows.seed, rows[column].astype(float), strict=True))


def accuracy_by_group_size(
    table: pd.DataFrame, value: str = "final", whole_grid: bool = True, resamples: int = RESAMPLES
):
    """Draws final accuracy over N per baseline: interquartile mean, 95 % interval, a point per seed.

    With a single N the baselines stand side by side instead.

    Args:
        table: rows of one setting.
        value: "final", "best" or "mean" of `final_accuracy`.
        whole_grid: whether every baseline must have been run at every size; else the cells that were run are drawn.
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
        of_arm = runs[runs.baseline == baseline]
        frame = pd.DataFrame([_point(of_arm, size, value, resamples) for size in sizes if (baseline, size) in cells])
        frame.insert(0, "baseline", baseline)
        shift = 2 ** (apart * (place - (len(baselines) - 1) / 2))
        at = {size: place if len(sizes) == 1 else size * shift for size in sizes}
        axes.plot(of_arm.group_size.map(at), of_arm[value], ".", ms=2, color=colour(baseline), alpha=0.5)
        line = "-" if len(frame) > 1 else ""  # a line through one point would be drawn in the legend alone
        places = frame.group_size.map(at)
        axes.plot(
            places, frame.estimate, color=colour(baseline), marker=marker(baseline), ls=line, label=label(baseline)
        )
        axes.vlines(places, frame.low, frame.high, color=colour(baseline), lw=0.9)
        plotted.append(frame)
    counts = pd.concat(plotted).seeds
    axes.set_ylabel(f"{value} held-out accuracy")
    axes.set_title(f"{seeds_text(counts)} per point{interval_text(counts, 'bars')}", loc="left", fontsize=7)
    if len(sizes) == 1:  # an axis of one size says nothing: the arms stand side by side
        axes.set(xlabel=f"group size N={sizes[0]}", xticks=range(len(baselines)), xlim=(-0.5, len(baselines) - 0.5))
        axes.set_xticklabels([label(baseline) for baseline in baselines], rotation=40, ha="right", fontsize=7)
    else:
        axes.set_xscale("log", base=2)
        axes.set(xlabel="group size N", xticks=sizes, xticklabels=sizes, xlim=(sizes[0] / 1.5, sizes[-1] * 1.5))
        axes.minorticks_off()
        legend_below(axes)
    keep_numbers(axes, pd.concat(plotted))
    return axes


def _point(of_arm: pd.DataFrame, size: int, value: str, resamples: int) -> dict:
    """Returns the interquartile mean of one arm at one size, with its interval."""
    values = of_arm[of_arm.group_size == size][value].to_numpy()
    return {"group_size": size, **bootstrap([values], iqm, resamples=resamples, bounds=(0, 1))._asdict()}
