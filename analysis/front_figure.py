"""Draws the figure of the front page: the gradient's noise under each estimator, from one laboratory measurement."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from analysis.arms import is_unbiased, label
from analysis.checks import require_columns
from analysis.style import PAGE, figure, keep_numbers
from otb.errors import RunError

INTERVAL = ("relative_noise_low", "relative_noise_high")
KINDS: dict[bool | None, tuple[str, dict]] = {
    True: ("unbiased", {"marker": "o", "color": "#0072B2"}),
    False: ("biased, if only by a factor", {"marker": "D", "color": "#D55E00", "markerfacecolor": "white"}),
    None: ("bias not known", {"marker": "x", "color": "0.45"}),
}


def front_figure(results: pd.DataFrame, policy: str, rollouts: int, sizes: tuple[int, ...] = (4, 32)):
    """Draws noise relative to RLOO per estimator with 95 % intervals, best first, one panel per group size.

    Args:
        results: estimators.csv of a measurement.
        policy: what was measured, for the title.
        rollouts: sampled per prompt, for the title.
        sizes: the group sizes; the first decides the order.

    Returns:
        Array of axes.

    Raises:
        RunError: a column or a group size is missing.
    """
    require_columns(results, "estimator", "group_size", "prompts", "relative_noise", *INTERVAL)
    if missing := sorted(set(sizes) - set(results.group_size)):
        raise RunError(f"The measurement has no group size {missing[0]}. Try group_sizes={list(sizes)}.")
    plotted = front_table(results, sizes)
    rows = {name: place for place, name in enumerate(reversed(list(dict.fromkeys(plotted.estimator))))}
    _, axes = figure(len(sizes), PAGE, 0.2 * len(rows) + 1.35, sharey=True, squeeze=False)
    for ax, (size, part) in zip(axes[0], plotted.groupby("group_size", sort=False), strict=True):
        ax.axvline(1, color="0.6", lw=0.8, zorder=0)
        for row in part.itertuples():
            _, style = KINDS[is_unbiased(str(row.estimator))]
            place = rows[row.estimator]
            ax.plot([row.relative_noise_low, row.relative_noise_high], [place] * 2, color=style["color"], lw=1.4)
            ax.plot(row.relative_noise, place, ls="", ms=5, **style)
        ax.set_title(f"groups of N = {size} rollouts", fontsize=9)
        ax.set(ylim=(-0.6, len(rows) - 0.4), xlim=(0, None))
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(list(rows.values()), [label(name) for name in rows], fontsize=8)
    for name, text in zip(rows, axes[0, 0].get_yticklabels(), strict=True):
        text.set_fontweight("bold" if name == "otb" else "normal")
    of_figure = axes[0, 0].figure
    prompts = int(results.prompts.iloc[0])
    of_figure.suptitle(f"Gradient noise of the {policy}: {prompts} prompts, {rollouts} rollouts of each", fontsize=10)
    of_figure.supxlabel(
        "noise of the gradient / noise with RLOO (lower is better); 95 % intervals over prompts", fontsize=8
    )
    kinds = [kind for kind in KINDS if kind in set(plotted.unbiased)]
    handles = [Line2D([], [], ls="", ms=5, label=KINDS[kind][0], **KINDS[kind][1]) for kind in kinds]
    axes[0, 0].legend(handles=handles, loc="lower left", fontsize=8)  # the worst rows leave this corner empty
    keep_numbers(axes[0], plotted)
    return axes[0]


def front_table(results: pd.DataFrame, sizes: tuple[int, ...]) -> pd.DataFrame:
    """Returns what is plotted: a row per group size and estimator, least noise at the first size first."""
    order = results[results.group_size == sizes[0]].sort_values("relative_noise", kind="stable").estimator
    columns = ["estimator", "group_size", "prompts", "relative_noise", *INTERVAL]
    of_size = {size: results[results.group_size == size].set_index("estimator") for size in sizes}
    parts = [part.reindex(order).assign(group_size=size).reset_index() for size, part in of_size.items()]
    table = pd.concat(parts, ignore_index=True)[columns]
    table.insert(1, "unbiased", pd.Series([is_unbiased(name) for name in table.estimator], dtype=object))
    return table
