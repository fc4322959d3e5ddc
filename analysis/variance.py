"""Variance proxies over steps, and the measured gradient noise where a run recorded it.

total_power is sum_t w_t A_t^2 per rollout, in logit space: it also shrinks when the gradient itself shrinks, and with
the rewards' spread. relative_power = total_power / (realized energy * reward variance) takes the last two out and is 1
for an advantage R - E[R] that knows nothing about energy. Neither is the variance of the gradient: that is measured by
experiments/variance.py, or online where a run has MEASURED in its rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import require
from analysis.curves import draw_curves
from analysis.style import PAGE, figure, keep_numbers

MEASURED = "gradient_noise"  # online two-batch-size estimate, recorded where the configuration asks for it


def with_relative_power(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with the column relative_power; NaN where a step's rewards are all equal, which leaves no variance."""
    require(table, "total_power", "energy_mean", "reward_spread")
    scale = table.energy_mean * table.reward_spread**2
    return table.assign(relative_power=(table.total_power / scale.where(scale > 0)).replace(np.inf, np.nan))


def variance(table: pd.DataFrame):
    """total_power and relative_power over steps per arm, and the measured noise where it is there. -> array of axes.

    Arms without energy metrics are missing from the figure and named in its title.
    """
    shown = with_relative_power(table)
    columns = ["total_power", "relative_power"]
    columns += [MEASURED] if MEASURED in table and table[MEASURED].notna().any() else []
    _, axes = figure(len(columns), PAGE, 2.4)
    names = {"total_power": r"proxy $\sum_t w_t A_t^2$ per rollout", "relative_power": "proxy / (energy × Var R)"}
    names[MEASURED] = "measured gradient noise"
    plotted = []
    for ax, column in zip(axes, columns, strict=True):
        measured = shown.groupby("arm", observed=True)[column].transform("count") > 0
        plotted.append(draw_curves(ax, shown[measured], column, log=True))
        ax.set(xlabel="step", ylabel=names[column])
        if lacking := sorted(set(shown.arm[~measured])):
            ax.set_title(f"{ax.get_title('left')}\nnot recorded: {', '.join(lacking)}", loc="left", fontsize=6)
    keep_numbers(axes, pd.concat(plotted))
    return axes


def power_per_run(table: pd.DataFrame) -> pd.Series:
    """run -> sum of total_power over its steps / sum of energy * reward variance: a step without power counts as well.

    Runs without energy metrics are absent.
    """
    require(table, "total_power", "energy_mean", "reward_spread")
    measured = table[table.total_power.notna()]
    scale = (measured.energy_mean * measured.reward_spread**2).groupby(measured.run.astype(str)).sum()
    return (measured.total_power.groupby(measured.run.astype(str)).sum() / scale.where(scale > 0)).dropna()
