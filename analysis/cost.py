"""Tabulates and draws time and memory per step and arm (C5). Medians, as the first step of a run warms up."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import by_arm
from analysis.checks import one_setting, require
from analysis.style import PAGE, figure, keep_numbers, seeds_text

PARTS = {"sampling": "#0072B2", "scoring": "#009E73", "advantages": "#D55E00", "loss": "#BBBBBB"}


def cost_table(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run: median seconds of each part of a step, and peak memory in GiB.

    advantage_share is that of the advantages in the step, advantage_ratio theirs to the loss (forward, backward,
    optimizer).
    """
    require(table, "seconds_step", "seconds_advantages", "seconds_loss")
    columns = [f"seconds_{part}" for part in (*PARTS, "step") if f"seconds_{part}" in table]
    rows = table.assign(
        advantage_share=table.seconds_advantages / table.seconds_step,
        advantage_ratio=table.seconds_advantages / table.seconds_loss,
    )
    keys = ["run", "baseline", "group_size", "seed"]
    medians = rows.groupby(keys, observed=True)[[*columns, "advantage_share", "advantage_ratio"]].median()
    if "peak_memory_bytes" in table:
        medians["peak_gib"] = rows.groupby(keys, observed=True).peak_memory_bytes.max() / 2**30
    return medians.reset_index()


def time_and_memory(table: pd.DataFrame):
    """Draws median seconds per step in its parts, and peak memory: a bar per arm, a tick per seed.

    Returns:
        The two axes.
    """
    runs = cost_table(one_setting(table))
    cells = by_arm(runs)
    _, (left, right) = figure(2, PAGE, 0.7 + 0.24 * max(4, len(cells)), sharey=True)
    place = np.arange(len(cells))[::-1]
    ends = np.zeros(len(cells))
    for part, tint in PARTS.items():
        if f"seconds_{part}" in runs:
            widths = np.array([rows[f"seconds_{part}"].mean() for *_, rows in cells])
            left.barh(place, widths, left=ends, color=tint, label=part, height=0.7)
            ends = ends + np.nan_to_num(widths)
    for at, (*_, rows) in zip(place, cells, strict=True):
        left.plot(rows.seconds_step, [at] * len(rows), "k|", ms=5, mew=0.6)
        if "peak_gib" in rows:
            right.barh([at], [rows.peak_gib.mean()], color="#56B4E9", height=0.7)
            right.plot(rows.peak_gib, [at] * len(rows), "k|", ms=5, mew=0.6)
    left.set(xlabel="seconds per step (median over steps)", yticks=place)
    left.set_yticklabels([f"{text} ({len(rows)})" for _, _, text, rows in cells])
    right.set_xlabel("peak memory (GiB)")
    left.legend(ncols=4, fontsize=6, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, columnspacing=0.8)
    right.set_title(f"{seeds_text([len(rows) for *_, rows in cells])} per arm; ticks: seeds", loc="left", fontsize=7)
    keep_numbers(left, runs)
    return left, right
