"""Draws variance proxies over steps, and the measured gradient noise where a run recorded it (C1).

total_power is sum_t w_t A_t^2 per rollout, in logit space: it also shrinks when the gradient itself shrinks, and with
the rewards' spread. relative_power = total_power / (realized energy * reward variance) takes the last two out and is 1
for an advantage R - E[R] that knows nothing about energy. Neither is the variance of the gradient: that is measured by
experiments/variance.py, or online where a run has MEASURED in its rows (measure_gradient_noise=true). The measured
noise shrinks with the gradient too: what arms are compared by is noise / signal, a ratio of sums over steps, as the
signal of one step is mostly noise itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import by_arm
from analysis.checks import require
from analysis.curves import draw_curves
from analysis.style import PAGE, figure, keep_numbers, legend_below
from otb.errors import RunError

MEASURED, SIGNAL = "gradient_noise", "gradient_signal"  # online, by two batch sizes, where the configuration asks
COMPARED = {
    MEASURED: "measured gradient noise",
    "total_power": r"proxy $\sum_t w_t A_t^2$",
    "verl_noise": "verl's form of the noise",
}


def with_relative_power(table: pd.DataFrame) -> pd.DataFrame:
    """Returns `table` with the column relative_power; NaN where all rewards of a step are equal."""
    require(table, "total_power", "energy_mean", "reward_spread")
    scale = table.energy_mean * table.reward_spread**2
    return table.assign(relative_power=(table.total_power / scale.where(scale > 0)).replace(np.inf, np.nan))


def variance(table: pd.DataFrame):
    """Draws gradient variance over steps per arm: measured, by the proxy and in verl's form where runs measured noise.

    Where none did: the proxy as it is, and relative to energy and reward variance.

    The measures have different units: each is drawn relative to its own mean over the first arm, on one logarithmic
    scale, so that a measure which ranks the arms or moves over the steps unlike the measured one stands out. Arms
    without a metric are missing from its panel and named in its title.

    Returns:
        Array of axes.
    """
    if is_measured(table):
        columns = [column for column in COMPARED if column in table and table[column].notna().any()]
        drawn, first = relative_to_first_arm(table, columns)
        names = {column: COMPARED[column] for column in columns}
    else:
        drawn = with_relative_power(table)
        names = {"total_power": r"proxy $\sum_t w_t A_t^2$ per rollout", "relative_power": "proxy / (energy × Var R)"}
    _, axes = figure(len(names), PAGE, 2.4)
    plotted = []
    for ax, column in zip(axes, names, strict=True):
        measured = drawn.groupby("arm", observed=True)[column].transform("count") > 0
        plotted.append(draw_curves(ax, drawn[measured], column, log=True))
        ax.set(xlabel="step", ylabel=names[column])
        if lacking := sorted(set(drawn.arm[~measured])):
            ax.set_title(f"{ax.get_title('left')}\nnot recorded: {', '.join(lacking)}", loc="left", fontsize=6)
    if is_measured(table):
        on_one_scale(axes, list(names.values()), f"relative to {first}, mean")
    legend_below(axes)
    keep_numbers(axes, pd.concat(plotted))
    return axes


def on_one_scale(axes, names: list[str], ylabel: str) -> None:
    """Gives panels that are read side by side one range, one label on the left, and the seeds over the first alone."""
    low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
    for ax, name in zip(axes, names, strict=True):
        title = ax.get_title("left").split("\n")
        lines = [name, *(title if ax is axes[0] else title[1:])]
        ax.set(ylim=(min(low), max(high)), ylabel=ylabel if ax is axes[0] else "")
        ax.set_title("\n".join(lines), loc="left", fontsize=7)


def is_measured(table: pd.DataFrame) -> bool:
    """Tells whether any run measured the gradient's noise."""
    return MEASURED in table and bool(table[MEASURED].notna().any())


def relative_to_first_arm(table: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, str]:
    """Returns `table` with each column relative to its mean over the first arm that measured all, and its name."""
    complete = table.dropna(subset=columns)
    if complete.empty:
        raise RunError(f"No run measured all of {', '.join(columns)}; run again with measure_gradient_noise=true.")
    _, _, name, first = by_arm(complete)[0]
    return table.assign(**{column: table[column] / first[column].mean() for column in columns}), name


def noise_to_signal_per_run(table: pd.DataFrame) -> pd.Series:
    """Returns run -> measured noise / measured signal of one prompt group's gradient, sums over the run's steps.

    It does not change with the gradient's scale, so that arms with different advantages can be compared. Runs that did
    not measure it are absent, and those whose signal sums to nothing positive: it drowned in the noise.
    """
    require(table, MEASURED, SIGNAL)
    sums = table[table[MEASURED].notna()].groupby(table.run.astype(str))[[MEASURED, SIGNAL]].sum()
    return (sums[MEASURED] / sums[SIGNAL])[sums[SIGNAL] > 0]


def power_per_run(table: pd.DataFrame) -> pd.Series:
    """Returns run -> sum of total_power over its steps / sum of energy * reward variance over the same steps.

    Runs without energy metrics are absent.
    """
    require(table, "total_power", "energy_mean", "reward_spread")
    measured = table[table.total_power.notna()]
    scale = (measured.energy_mean * measured.reward_spread**2).groupby(measured.run.astype(str)).sum()
    return (measured.total_power.groupby(measured.run.astype(str)).sum() / scale.where(scale > 0)).dropna()
