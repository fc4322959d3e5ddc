"""Tabulates the collapses of claim C2 for every setting of its grid, and draws them over steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import by_arm, colour, label
from analysis.claims.rules import RESAMPLES, SEEDS
from analysis.group_size import final_accuracy
from analysis.intervals import Interval, bootstrap, iqm
from analysis.report.markdown import markdown_table
from analysis.stability import stability_table, survivors
from analysis.style import PAGE, figure, figure_of, keep_numbers, legend_below, seeds_text
from study.answer import effect_text
from study.collected import steps_table
from study.verdicts import SETTING

SIDE_BY_SIDE = 4  # panels of a figure
FEWEST_RATES = 3  # of a setting, below which nothing is said of where its runs end highest and where they break
ROOM_TEXT = (
    "Room: how many times its best rate an arm takes until half of its runs collapse. The first number is the last "
    "rate at which fewer do, the second the next rate that was run. *At least*: no rate below the best, or none "
    "that is high enough, was run. A gradient that is smaller by a factor acts like a lower rate: the room stays."
)
APART = 0.01  # of the share: what lines of arms are shifted by


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per setting and arm: runs, collapsed, median step of collapse, final accuracy with its interval.

    rows: of one task. A run that has not collapsed has no step of collapse; NaN where none has.
    """
    found = []
    for (rate, varied, baseline), part in rows.groupby([*SETTING, "baseline"]):
        table = steps_table(part)
        ends = stability_table(table)
        final = bootstrap([final_accuracy(table).final.to_numpy()], iqm, resamples=RESAMPLES, bounds=(0, 1))
        facts = {"learning_rate": rate, "varied": varied, "baseline": baseline, "runs": len(ends)}
        facts |= {"collapsed": int(ends.collapsed.sum()), "collapsed_at": ends.collapsed_at.median()}
        found.append(facts | {"final": final.estimate, "final_low": final.low, "final_high": final.high})
    return pd.DataFrame(found)


def cells_section(table: pd.DataFrame) -> str:
    """Returns the table of a page, a row per setting, with the columns of each arm side by side."""
    shown = []
    for (rate, varied), part in table.groupby(SETTING):
        row = {"learning rate": f"{rate:g}", "setting": f"`{varied}`"}
        arm: Any
        for arm in part.sort_values("baseline", ascending=False).itertuples():
            name = label(str(arm.baseline))
            at = "" if np.isnan(arm.collapsed_at) else f", median step {arm.collapsed_at:.0f}"
            row[f"{name}: collapsed"] = f"{arm.collapsed} of {arm.runs}{at}"
            row[f"{name}: final accuracy"] = effect_text(Interval(arm.final, arm.final_low, arm.final_high, arm.runs))
        shown.append(row)
    return markdown_table(pd.DataFrame(shown).fillna(""))


def room(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per setting: how many times its best rate it takes until half of an arm's runs collapse.

    table: of `cells`. Rates at which an arm has too few runs for a verdict are left out, and so are settings with fewer
    than `FEWEST_RATES` rates.
    """
    shown = []
    for varied, of_setting in table[table.runs >= SEEDS].groupby("varied"):
        row = {"setting": f"`{varied}`"}
        for baseline, of_arm in sorted(of_setting.groupby("baseline"), reverse=True):
            arm = of_arm.sort_values("learning_rate", ignore_index=True)
            if len(arm) < FEWEST_RATES:
                continue
            rates, broken = arm.learning_rate.to_numpy(), (arm.collapsed >= arm.runs / 2).to_numpy()
            best, first = int(arm.final.to_numpy().argmax()), int(broken.argmax()) if broken.any() else None
            last = len(rates) - 1 if first is None else max(first - 1, 0)
            name, least = label(str(baseline)), "at least " if best == 0 or first is None else ""
            most = "" if first is None else f" to {rates[first] / rates[best]:.2g}"
            row[f"{name}: ends highest at"] = f"{rates[best]:g}"
            row[f"{name}: half collapse at"] = "none" if first is None else f"{rates[first]:g}"
            row[f"{name}: room"] = f"{least}{rates[last] / rates[best]:.2g}{most}"
        if len(row) > 1:
            shown.append(row)
    return pd.DataFrame(shown)


def room_section(table: pd.DataFrame) -> list[str]:
    """Returns the lines of a page with the table of `room`, none where it has no rows. table: of `cells`."""
    rows = room(table)
    return [] if rows.empty else [ROOM_TEXT, "", markdown_table(rows)]


def survival(rows: pd.DataFrame):
    """Draws the share of runs that have not collapsed over steps, a panel per learning rate, all its settings pooled.

    Rates at which no run of any arm collapsed are named below and get no panel, unless that is so at every rate. At
    most four panels stand side by side: more would write their titles over each other.

    rows: of one task.

    Returns:
        Array of axes.
    """
    tables = {rate: stability_table(steps_table(part)) for rate, part in rows.groupby("learning_rate")}
    flat = [rate for rate, runs in tables.items() if not runs.collapsed.any()]
    rates = [rate for rate in tables if rate not in flat or len(flat) == len(tables)]
    lines = -(-len(rates) // SIDE_BY_SIDE)
    _, axes = figure(min(SIDE_BY_SIDE, len(rates)), PAGE, 0.8 + 1.3 * lines, lines, sharey=True, squeeze=False)
    for panel in axes.flat[len(rates) :]:
        panel.remove()
    panels, plotted = axes.flat[: len(rates)], []
    for number, (panel, rate) in enumerate(zip(panels, rates, strict=True)):
        of_rate = rows[rows.learning_rate == rate]
        runs = tables[rate]
        counts = []
        for place, (baseline, _, text, arm) in enumerate(by_arm(runs)):
            share, low, high = survivors(arm, int(runs.last_step.max()))
            shift = APART * place  # lines of arms that all live would hide each other
            panel.step(range(len(share)), share - shift, where="post", color=colour(baseline), label=text)
            panel.fill_between(range(len(share)), low, high, step="post", color=colour(baseline), alpha=0.12, lw=0)
            counts.append(len(arm))
            plotted.append(arm.assign(learning_rate=rate))
        panel.set_ylim(-0.03, 1.03)
        panel.set_xlabel("step" if number + SIDE_BY_SIDE >= len(rates) else "")  # where no panel stands below
        of_arm = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
        about = f"{of_arm} runs per arm, {seeds_text([of_rate.seed.nunique()])}"
        optimizer = "SGD, " if of_rate.varied.str.contains("trainer.optim=sgd").all() else ""
        panel.set_title(f"{optimizer}learning rate {rate:g}\n{about}", fontsize=7)
    figure_of(axes).supylabel(f"share of runs alive (95 % Wilson; arms {APART} apart)", fontsize=8)
    legend_below(panels)
    if rates != list(tables):
        names = ", ".join(f"{rate:g}" for rate in flat)
        figure_of(axes).legends[0].set_title(f"no run of any arm collapsed at learning rate {names}")
    keep_numbers(axes, pd.concat(plotted))
    return panels
