"""Lists the figures of a report in order: name, caption, and how each is drawn from a setting's rows. Used by parts.py.

Each of them draws from a table alone; those that read samples are in sample_figures.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.arms import label
from analysis.cost import time_and_memory
from analysis.group_size import accuracy_by_group_size, final_accuracy, final_words
from analysis.intervals import FEWEST
from analysis.learning_curves import gradient_norm_and_accuracy, learning_curves
from analysis.noise import variance
from analysis.report.drawing import Figure
from analysis.report.sample_figures import sample_figures
from analysis.runs.load import Runs
from analysis.stability import stability
from analysis.style import PAGE
from analysis.token_figure import token_consumption
from otb.errors import RunError

EVALUATIONS = "Markers: evaluations; the straight lines between them are interpolation, nothing was measured there."
MAIN_ARMS = ("otb", "group_mean", "grpo", "rloo", "opo")  # OTB and the group baselines that the paper compares with


def all_figures(loaded: Runs, table: pd.DataFrame, target: float | None) -> Iterator[Figure]:
    """Yields the figures of one setting.

    Curves come once per group size: eight arms at four sizes are 32 lines, which nobody reads.

    Args:
        loaded: the folder of runs.
        table: the rows of one setting of `loaded.used`.
        target: accuracy of the token figure; None leaves it out.
    """
    sizes = sorted(table.group_size.dropna().unique())
    for size in sizes:
        yield from curve_figures(
            table[table.group_size == size], int(size), loaded.outside if size == sizes[0] else None
        )
    if table.empty:
        text = "Reward of plain TRL runs over steps: their arms are not known, so nothing is averaged."
        rows = (loaded.outside,)
        yield Figure("reward_over_steps", text, rows, lambda: learning_curves(loaded.outside, "reward_mean"))
        return
    text = f"Held-out accuracy at the end ({end_words(table)}) against the group size"
    yield Figure("accuracy_by_group_size", f"{text}.", (table,), lambda: accuracy_by_group_size(table))
    of_arm = table.groupby("baseline", observed=True).group_size.nunique()
    whole = of_arm.index[of_arm == len(sizes)]
    if 0 < len(whole) < len(of_arm):
        part = table[table.baseline.isin(whole)]
        others = ", ".join(label(name) for name in of_arm.index.difference(whole))
        yield Figure(
            "accuracy_by_group_size_whole_arms",
            f"{text}, without the arms that lack a size: {others}.",
            (part,),
            lambda: accuracy_by_group_size(part),
        )
    if target is not None:
        yield Figure(
            "token_consumption",
            f"Own tokens until {target:g} held-out accuracy (restricted mean; runs that never get there are censored, "
            "not dropped) and the tokens that OTB saves against each rival of the same group size.",
            (table,),
            lambda: token_consumption(table, target),
        )
    yield from sample_figures(loaded, table)
    yield Figure("time_and_memory", "Time and memory per step.", (table,), lambda: time_and_memory(table))


def end_words(table: pd.DataFrame) -> str:
    """Returns what the accuracy at the end is in these runs; "not measured" where it is in none."""
    try:
        return final_words(final_accuracy(table))
    except RunError:  # the figure says which runs would have it
        return "not measured"


def main_figure(table: pd.DataFrame) -> Figure | None:
    """Returns the first figure: held-out accuracy over own tokens at one group size. None without any run.

    The rule: OTB and its rivals of MAIN_ARMS at the group size at which most of them have runs; of several sizes the
    smallest. Where OTB was compared with none of them, all arms count.
    """
    if table.empty:
        return None
    main = table[table.baseline.isin(MAIN_ARMS)]
    if main.baseline.nunique() < 2 or "otb" not in set(main.baseline):
        main = table
    arms = {int(size): main.baseline[main.group_size == size].nunique() for size in sorted(main.group_size.unique())}
    size = max(arms, key=lambda size: arms[size])  # the first, and so the smallest, of equals
    caption = f"Held-out accuracy over the tokens that a run sampled itself, N={size}. {EVALUATIONS} "
    rows = main[main.group_size == size]
    return Figure(
        f"held-out_accuracy_over_own_tokens_n{size}",
        f"{caption}Thin lines: seeds; thick, from {FEWEST} seeds on: interquartile mean with its pointwise 95 % "
        "interval; cross: diverged.",
        (rows,),
        lambda: learning_curves(rows, x="own_tokens_total", width=PAGE),
    )


def curve_figures(table: pd.DataFrame, n: int, outside: pd.DataFrame | None) -> Iterator[Figure]:
    """Yields the curves of one group size. outside: plain TRL runs, which stand in the reward curves."""
    text = f"N={n}. Thin lines: seeds; thick, from {FEWEST} seeds on: interquartile mean; cross: diverged"
    rows = (table,) if outside is None else (table, outside)
    yield Figure(
        f"gradient_norm_and_accuracy_n{n}",
        f"Gradient norm before clipping and held-out accuracy (as in the paper's Figure 1), {text}. {EVALUATIONS}",
        rows,
        lambda: gradient_norm_and_accuracy(table),
    )
    for x, over in (("step", "steps"), ("own_tokens_total", "own tokens")):
        yield Figure(
            f"accuracy_over_{over.replace(' ', '_')}_n{n}",
            f"Held-out accuracy over {over}, {text}. {EVALUATIONS}",
            rows,
            lambda x=x: learning_curves(table, x=x),
        )
    yield Figure(
        f"reward_over_steps_n{n}",
        f"Training reward over steps, {text}.",
        rows,
        lambda: learning_curves(table, "reward_mean", outside=outside),
    )
    yield Figure(
        f"variance_n{n}",
        f"Variance per step, measured where runs did, and its proxies (analysis/noise.py), {text}.",
        rows,
        lambda: variance(table),
    )
    text = f"Seeds alive, gradient-norm surges, drawdown from the peak, N={n}."
    yield Figure(f"stability_n{n}", text, rows, lambda: stability(table))
