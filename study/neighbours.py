"""Compares the methods beside the baseline, each off, on and its controls, from the rows of neighbours_*.csv.

`python -m study report` writes docs/neighbours/comparison.md and its csv and figures.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis.arms import label
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import Interval, bootstrap, difference, iqm
from analysis.report.markdown import markdown_table
from analysis.stability import stability_table
from analysis.style import PAGE, figure, keep_numbers, save, seeds_text
from study.answer import effect_text
from study.collected import numbers, steps_table


class Question(NamedTuple):
    """A question that recipes answer. off: the variant without the method, with which all others are compared.

    more: further recipes that answer it.
    """

    title: str
    page: str
    off: str
    more: tuple[str, ...] = ()


QUESTIONS = {
    "neighbours_improvement": Question("Improvement updates (PIPO)", "pipo.md", "improvement=none"),
    "neighbours_plateau": Question("Improvement updates on a plateau, 200 steps", "pipo.md", "improvement=none"),
    "neighbours_auxiliary": Question("An auxiliary head (OCC), two updates a batch", "occ.md", "auxiliary=mtp_detach"),
    "neighbours_token_weights": Question("Token weights (ARCA), with LoRA", "token_weights.md", "token_weights=none"),
    "neighbours_schedule": Question(
        "Length-triggered decay, a sampler that differs",
        "length_triggered.md",
        "schedule.floor=1.0",
        ("neighbours_schedule_cosine", "neighbours_schedule_tools"),
    ),
}
HEAD = """\
# The methods compared

`python -m study report` writes this page from `study/rows/neighbours_*.csv`, which has a row per run; `python -m study
NAME` runs what has no row. All runs are of the tiny policy on a CPU. Final accuracy is the mean of the last two
evaluations. Differences are paired by seed. Numbers are interquartile means with 95 % intervals over seeds; own tokens
are those of the median run. [The page of the methods](../neighbours.md) has the cost of a step, which these runs cannot
show, because they shared two cores with other work.

These are {differences} exploratory comparisons without a pre-registered rule and without a correction for their number.
By chance alone, about {by_chance} of their intervals would exclude 0.

Gradient noise is P times the mean of |g|^2 over the steps of a run, for P prompts a step and gradient g. On average
that is the noise of one prompt group's gradient plus P times the squared norm of the true gradient, an upper bound;
[we measured how close it is](../neighbours.md#gradient-noise). The numbers are geometric means over seeds.
"""


def comparison(rows: pd.DataFrame, off: str) -> pd.DataFrame:
    """Returns a row per task, baseline, learning rate and variant: final accuracy, gradient noise, tokens, to off.

    rows: of one recipe. off: the variant that the others are compared with.
    """
    found = []
    for (task, baseline, rate), part in rows.groupby(["task", "baseline", "learning_rate"], sort=False):
        finals = {str(name): finals_of(of_variant) for name, of_variant in part.groupby("varied")}
        noises = {str(name): log_noise_of(of_variant) for name, of_variant in part.groupby("varied")}
        for name, of_variant in part.groupby("varied"):
            name = str(name)
            against = difference(finals[name], finals[off]) if name != off and off in finals else None
            found.append(
                {"task": task, "baseline": baseline, "learning_rate": rate, "variant": name, "seeds": len(of_variant)}
                | columns("final", bootstrap([list(finals[name].values())], iqm, bounds=(0, 1)))
                | (columns("difference", against) if against else {})
                | {"noise": math.exp(iqm(list(noises[name].values())))}
                | (columns("noise_ratio", exponential(difference(noises[name], noises[off]))) if against else {})
                | {"collapsed": int(stability_table(steps_table(of_variant)).collapsed.sum())}
                | {"own_tokens": float(np.median([numbers(cell)[-1] for cell in of_variant.own_tokens_total]))}
            )
    return pd.DataFrame(found)


def finals_of(rows: pd.DataFrame) -> dict:
    """Returns seed -> final accuracy of the runs of one variant."""
    return by_seed(final_accuracy(steps_table(rows)), "final")


def log_noise_of(rows: pd.DataFrame) -> dict[int, float]:
    """Returns seed -> log of P mean |g|^2 over the steps of a run, its gradient noise with P times its signal.

    g: a step's gradient before it is clipped, the mean over P prompt groups. A step without a finite one has no part.
    """
    found = {}
    for row in rows.to_dict("records"):
        norms = numbers(row["gradient_norm"])
        found[row["seed"]] = float(np.log(row["prompts_per_step"] * np.square(norms[np.isfinite(norms)]).mean()))
    return found


def exponential(found: Interval) -> Interval:
    """Returns the ratio of which an interval is the logarithm."""
    return Interval(math.exp(found.estimate), math.exp(found.low), math.exp(found.high), found.seeds)


def columns(name: str, found: Interval) -> dict[str, float]:
    """Returns an estimate and its interval as three columns."""
    return {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}


def text(row: pd.Series, name: str) -> str:
    """Returns an estimate with its interval; "" where there is none."""
    return (
        "" if pd.isna(row.get(name)) else effect_text(Interval(row[name], row[f"{name}_low"], row[f"{name}_high"], 0))
    )


def page_table(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the table of a page."""
    return pd.DataFrame(
        {
            "task": f"`{row.task}`",
            "baseline": label(row.baseline),
            "variant": f"`{row.variant}`",
            **({"learning rate": f"{row.learning_rate:g}"} if table.learning_rate.nunique() > 1 else {}),
            "seeds": row.seeds,
            "final accuracy": text(row, "final"),
            "minus off": text(row, "difference"),
            "gradient noise": f"{row.noise:.2g}",
            "over off": text(row, "noise_ratio"),
            "collapsed": row.collapsed,
            "own tokens": f"{row.own_tokens / 1e3:.0f}k",
        }
        for _, row in table.iterrows()
    )


def drawing(table: pd.DataFrame, title: str, off: str):
    """Draws the differences to off with their intervals, a row per variant, a panel per task, each on its own scale.

    Returns:
        Array of axes.
    """
    drawn = table[table.difference.notna()]
    tasks, several = list(dict.fromkeys(drawn.task)), drawn.learning_rate.nunique() > 1
    counts = [int((drawn.task == task).sum()) for task in tasks]
    height = 0.2 * sum(counts) + 0.55 * len(tasks) + 0.6
    _, axes = figure(1, PAGE, height, rows=len(tasks), squeeze=False, height_ratios=[count + 1 for count in counts])
    for ax, task in zip(axes[:, 0], tasks, strict=True):
        rows = drawn[drawn.task == task]
        rows = rows[::-1]  # the first row on top
        places = range(len(rows))
        ax.axvline(0, color="0.6", lw=0.8, zorder=0)
        ax.hlines(places, rows.difference_low, rows.difference_high, color="#0072B2", lw=1.6)
        ax.plot(rows.difference, places, ls="", marker="o", ms=2.5, color="#0072B2")
        rates = [f", learning rate {rate:g}" if several else "" for rate in rows.learning_rate]
        arms = zip(rows.variant, rows.baseline, rates, strict=True)
        names = [f"{plain(variant)}, {label(baseline)}{rate}" for variant, baseline, rate in arms]
        ax.set_yticks(list(places), names, fontsize=7)
        ax.set_title(f"{task}, {seeds_text(rows.seeds)}", fontsize=9)
        ax.set_ylim(-0.6, len(rows) - 0.4)
        ax.xaxis.set_major_locator(MaxNLocator(7))
        ax.grid(axis="y", visible=False)
    axes[0, 0].figure.suptitle(title, fontsize=10)
    axes[0, 0].figure.supxlabel(f"final accuracy, minus the one with {off}; 95 % intervals over seeds", fontsize=8)
    keep_numbers(axes, drawn)
    return axes


def plain(variant: str) -> str:
    """Returns a variant in words: schedule.floor=0.1 -> "floor 0.1"."""
    return re.sub(r"(?:\w+\.)*(\w+)=", r"\1 ", variant).replace("_", " ")


def write_methods(rows: dict[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Writes comparison.md, comparison.csv and figures into docs/neighbours from the rows of each recipe.

    Nothing is written where no recipe has rows.
    """
    asked = {name: question for name, question in QUESTIONS.items() if name in rows}
    if not asked:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    lines, tables, written = [], [], []
    for name, question in asked.items():
        recipes = [name, *(other for other in question.more if other in rows)]
        table = comparison(pd.concat([rows[recipe] for recipe in recipes], ignore_index=True), question.off)
        tables.append(table.assign(recipe=name))
        command = f"`python -m study {' '.join(recipes)}`"
        lines += [f"## {question.title}", "", f"{command}, [method]({question.page}).", ""]
        lines += [markdown_table(page_table(table)), ""]
        if "difference" in table and table.difference.notna().any():
            written += save(drawing(table, question.title, question.off), folder / "figures" / name, ("png", "pdf"))
            lines += [f"![{question.title}](figures/{name}.png)", ""]
    differences = int(pd.concat(tables).get("difference", pd.Series(dtype=float)).notna().sum())
    head = HEAD.format(differences=differences, by_chance=round(0.05 * differences))
    (folder / "comparison.md").write_text("\n".join([head, *lines]), encoding="utf8")
    pd.concat(tables).to_csv(folder / "comparison.csv", index=False, float_format="%.6g")
    return [folder / "comparison.md", folder / "comparison.csv", *written]
