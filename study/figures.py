"""Draws the figures of study, one per claim and task."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.arms import label
from analysis.claims.rules import RESAMPLES, RIVAL, SMALL
from analysis.curves import draw_curves
from analysis.group_size import accuracy_by_group_size
from analysis.intervals import FEWEST
from analysis.style import COLUMN, PAGE, figure, figure_of, keep_numbers, legend_below, save
from analysis.ticks import plain_log
from otb.errors import RunError
from study import verdicts
from study.collapses import survival
from study.collected import COSINE, MAIN, OTHERS, of_kind, steps_table
from study.verdicts import STAGES, sizes_of

TITLES = {"C2": "Runs alive", "C3": "Final accuracy", "C4": "Accuracy over tokens"}
LARGEST_RATIO = 2.5  # of noises on a linear axis: beyond, most arms would share a fifth of it
TITLE_LINE = 0.25  # inches of height
STYLES = ({"marker": "o", "color": "#0072B2"}, {"marker": "D", "color": "#D55E00", "markerfacecolor": "white"})


def figures(rows: dict[str, pd.DataFrame], noise: dict[str, pd.DataFrame], folder: Path) -> dict[tuple[str, str], Path]:
    """Draws one figure per claim and task; returns (claim, task) -> picture.

    rows: by the name of their file. noise: of C1, by task. Where there are too few arms yet, there is no figure.
    """
    drawn: dict[tuple[str, str], Path] = {}
    for of_task, results in noise.items():
        files = save(noise_over_training(results), folder / f"c1_{file_name(of_task)}", ("png", "pdf"))
        drawn["C1", of_task] = files[0]
    makers: list[tuple[str, str, Callable]] = [
        ("C3", MAIN, lambda rows: accuracy_by_group_size(steps_table(rows), whole_grid=False, resamples=RESAMPLES)),
        ("C4", MAIN, curves_over_tokens),
        ("C2", OTHERS["C2"], lambda rows: survival(verdicts.judged_settings(rows)[0])),
    ]
    drawable = {name: part for name, part in rows.items() if name != COSINE}  # a panel is about a rate that stays
    for claim, kind, make in makers:
        for task, part in of_kind(drawable, kind).groupby("task"):
            try:
                axes = make(part)
            except RunError:  # the tables say which arms are missing
                continue
            of_figure = figure_of(axes)
            of_figure.suptitle(f"{TITLES[claim]} on {task}", fontsize=10 if of_figure.get_figwidth() > COLUMN else 8)
            of_figure.set_figheight(of_figure.get_figheight() + TITLE_LINE)
            files = save(axes, folder / f"{claim.lower()}_{file_name(str(task))}", ("png", "pdf"))
            drawn[claim, str(task)] = files[0]
    return drawn


def file_name(task: str) -> str:
    """Returns a task as a part of a file's name."""
    return re.sub(r"[^a-z0-9_.]+", "-", task.lower())


def noise_over_training(results: pd.DataFrame):
    """Draws noise relative to RLOO with 95 % intervals over prompts, a panel per stage, at N = 4 and the largest N.

    Args:
        results: of one task, as study.moments.relative_noise returns it.

    Returns:
        Array of axes.
    """
    sizes = dict(zip(sizes_of(results), STYLES, strict=True))
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
        ax.set(ylim=(-0.6, len(places) - 0.4))
        if of_others.relative_noise_high.max() > LARGEST_RATIO:
            ax.set_xscale("log")
            plain_log(ax.xaxis)
        else:
            ax.set_xlim(0, 1.04 * of_others.relative_noise_high.max())
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


def curves_over_tokens(rows: pd.DataFrame):
    """Draws held-out accuracy over own tokens: all arms at N = 4, beside them OTB, RLOO and GRPO at every N they have.

    Markers are evaluations, at their mean tokens over seeds; the straight lines between them, as
    `analysis.token_consumption` reads curves, are interpolation. The second panel is left out where N = 4
    is the only N.

    Returns:
        Array of one or two axes.
    """
    table = steps_table(rows)
    small, rivals = table[table.group_size == SMALL], table[table.baseline.isin(["otb", "rloo", "grpo"])]
    if small.seed.nunique() < FEWEST or rivals.empty:
        raise RunError(f"Means are drawn of {FEWEST} seeds and more: a panel would be empty.")
    sizes = sorted(set(rivals.group_size))
    panels = [(small, "N = 4, all arms")]
    if sizes != [SMALL]:
        named = [f"{size} ({style})" for size, style in zip(sizes, ("solid", "dashed"), strict=False)]
        panels.append((rivals, f"N = {' and '.join(named)}"))
    _, axes = figure(len(panels), PAGE if len(panels) > 1 else COLUMN, 2.6, sharey=True, squeeze=False)
    plotted = []
    for ax, (part, title) in zip(axes[0], panels, strict=True):
        plotted.append(draw_curves(ax, part, "evaluation_accuracy", "own_tokens_total", seed_lines=False))
        ax.set_title(f"{title}\n{ax.get_title('left')}", loc="left", fontsize=7)
        ax.set_xlabel("own tokens sampled\n(markers: evaluations; lines between them: interpolation)", fontsize=7)
    for line in axes[0, 1].get_lines() if len(panels) > 1 else ():  # the legend has the arms of N = 4 once
        if ", N=4 " in str(line.get_label()):
            line.set_label("_")
    axes[0, 0].set_ylabel("held-out accuracy (avg@k)")
    legend_below(axes)
    keep_numbers(axes, pd.concat(plotted))
    return axes[0]
