"""Draws claim C1: the noise of each estimator relative to RLOO at the start, at half and at the end of training."""

from __future__ import annotations

import pandas as pd

from analysis.arms import label
from analysis.study.verdicts import RIVAL, SMALL, STAGES, judged_sizes
from analysis.style import PAGE, figure, keep_numbers

STYLES = ({"marker": "o", "color": "#0072B2"}, {"marker": "D", "color": "#D55E00", "markerfacecolor": "white"})


def noise_over_training(results: pd.DataFrame):
    """Draws noise relative to RLOO with 95 % intervals over prompts, a panel per stage, at N = 4 and the largest N.

    Args:
        results: of one task, as analysis.study.noise.relative_noise returns it.

    Returns:
        Array of axes.
    """
    sizes = dict(zip(judged_sizes(results), STYLES, strict=True))
    of_others = results[(results.estimator != RIVAL) & results.group_size.isin(sizes)]
    by_noise = of_others[of_others.group_size == SMALL].groupby("estimator").relative_noise.mean()
    places = {name: place for place, name in enumerate(by_noise.sort_values(ascending=False).index)}
    stages = [stage for stage in STAGES if stage in set(of_others.stage)]
    _, axes = figure(len(stages), PAGE, 0.22 * len(places) + 1.35, sharex=True, sharey=True, squeeze=False)
    for ax, stage in zip(axes[0], stages, strict=True):
        ax.axvline(1, color="0.6", lw=0.8, zorder=0)
        for (size, style), offset in zip(sizes.items(), (0.14, -0.14), strict=True):
            for row in of_others[(of_others.stage == stage) & (of_others.group_size == size)].itertuples():
                place = places[row.estimator] + offset
                ax.plot([row.relative_noise_low, row.relative_noise_high], [place] * 2, color=style["color"], lw=1.2)
                ax.plot(row.relative_noise, place, ls="", ms=4, **style)
        ax.set_title({"start": "start", "half": "half of training", "end": "end"}[stage], fontsize=9)
        ax.set(ylim=(-0.6, len(places) - 0.4), xlim=(0, 1.04 * of_others.relative_noise_high.max()))
        ax.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(list(places.values()), [label(name) for name in places], fontsize=8)
    for size, style in sizes.items():
        axes[0, 0].plot([], [], ls="", ms=4, label=f"N = {size}", **style)
    axes[0, 0].legend(fontsize=8, loc="upper right")
    of_figure = axes[0, 0].figure
    first, policies = results.iloc[0], results.policies.min()
    of_figure.suptitle(
        f"Gradient noise on {first.task}: {policies} {'policy' if policies == 1 else 'policies'}, "
        f"{results.prompts.min()} prompts",
        fontsize=10,
    )
    of_figure.supxlabel(
        "noise of the gradient / noise with RLOO (lower is better); 95 % intervals over prompts", fontsize=8
    )
    columns = ["stage", "estimator", "group_size", "relative_noise", "relative_noise_low", "relative_noise_high"]
    keep_numbers(axes[0], of_others[columns])
    return axes
