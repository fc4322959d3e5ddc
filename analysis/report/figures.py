"""Lists the figures of a report in order: name, caption, and how each is drawn from a setting's rows. Used by parts.py.

Each entry draws from a table alone; those of token positions read the samples of one run first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pandas as pd

from analysis.arms import label
from analysis.cost import time_and_memory
from analysis.group_size import accuracy_by_group_size
from analysis.learning_curves import gradient_norm_and_accuracy, learning_curves
from analysis.noise import variance
from analysis.runs.load import Runs
from analysis.runs.samples import read_group, read_samples, sample_files
from analysis.stability import stability
from analysis.style import PAGE
from analysis.token_figure import token_consumption
from analysis.token_positions import energy_against_reward, token_positions
from otb.errors import RunError

MAIN_ARMS = ("otb", "group_mean", "grpo", "rloo", "opo")  # OTB and the group baselines that the paper compares with
RUNS_WITH_SAMPLES = 200  # of which energy is compared with reward


class Figure(NamedTuple):
    """A figure of a report, not drawn yet."""

    name: str  # of the files
    caption: str
    rows: tuple[pd.DataFrame, ...]  # what it draws from: where these and the caption stay, so does the picture
    draw: Callable  # () -> axes


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
    text = "Held-out accuracy at the end (mean of the last two evaluations) against the group size"
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


def main_figure(table: pd.DataFrame) -> Figure | None:
    """Returns the one figure that stands first: held-out accuracy over own tokens, of OTB and its main rivals.

    The rule: the group size at which most arms beside OTB have runs, of several the smallest; of its arms OTB and the
    rivals of MAIN_ARMS. None where OTB has no run, or was compared with none.
    """
    main = table[table.baseline.isin(MAIN_ARMS)]
    arms = {int(size): set(main.baseline[main.group_size == size].astype(str)) for size in main.group_size.unique()}
    compared = {size: len(names) for size, names in sorted(arms.items()) if "otb" in names and len(names) > 1}
    if not compared:
        return None
    size = max(compared, key=lambda size: compared[size])  # the first, and so the smallest, of equals
    caption = f"Held-out accuracy over the tokens that a run sampled itself, N={size}. Thin lines: seeds; thick: "
    rows = main[main.group_size == size]
    return Figure(
        f"held-out_accuracy_over_own_tokens_n{size}",
        caption + "interquartile mean with its pointwise 95 % interval; cross: diverged.",
        (rows,),
        lambda: learning_curves(rows, x="own_tokens_total", width=PAGE),
    )


def curve_figures(table: pd.DataFrame, n: int, outside: pd.DataFrame | None) -> Iterator[Figure]:
    """Yields the curves of one group size. outside: plain TRL runs, which stand in the reward curves."""
    text = f"N={n}. Thin lines: seeds; cross: diverged. Interquartile mean"
    rows = (table,) if outside is None else (table, outside)
    yield Figure(
        f"gradient_norm_and_accuracy_n{n}",
        f"Gradient norm before clipping and held-out accuracy (the form of the paper's Figure 1), {text}.",
        rows,
        lambda: gradient_norm_and_accuracy(table),
    )
    for x, over in (("step", "steps"), ("own_tokens_total", "own tokens")):
        yield Figure(
            f"accuracy_over_{over.replace(' ', '_')}_n{n}",
            f"Held-out accuracy over {over}, {text}.",
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


def sample_figures(loaded: Runs, table: pd.DataFrame) -> Iterator[Figure]:
    """Yields one prompt group of an OTB run token by token, and energy against reward over the samples of all."""
    ours = table[table.baseline == "otb"]
    runs = list(ours.run.astype(str).unique())
    name = runs[0] if runs else "the OTB run, of which there is none"
    files = (files_of_samples(loaded, runs),)
    yield Figure(
        "token_positions",
        f"What OTB does in one prompt group of {name}: realized energy, baseline and advantage over own tokens.",
        files,
        lambda: token_positions(read_group(_directory(loaded, runs))),
    )
    yield Figure(
        "energy_against_reward",
        f"Energy of a rollout relative to its group by reward, over the last samples of {label('otb')}'s runs: OTB can "
        "help where the two go together.",
        files,
        lambda: energy_against_reward(all_samples(loaded, runs)),
    )


def _directory(loaded: Runs, runs: list[str]):
    if not runs:
        raise RunError("No finished run of OTB. Run: python experiments/run.py baseline=otb")
    return loaded.directory(runs[0])


def files_of_samples(loaded: Runs, runs: list[str]) -> pd.DataFrame:
    """Returns a row per file of the last samples of runs: its path and when it was written."""
    kept = [sample_files(loaded.directory(run)) for run in runs[:RUNS_WITH_SAMPLES]]
    files = [file for of_run in kept if of_run for file in of_run[max(of_run)]]
    return pd.DataFrame({"file": map(str, files), "written": [file.stat().st_mtime_ns for file in files]})


def all_samples(loaded: Runs, runs: list[str]) -> pd.DataFrame:
    """Reads the last samples of runs, by name, with the column `run`; of `RUNS_WITH_SAMPLES` runs at most."""
    _directory(loaded, runs)
    parts = []
    for run in runs[:RUNS_WITH_SAMPLES]:
        try:
            parts.append(read_samples(loaded.directory(run)).assign(run=run))
        except RunError:  # a run without samples; where all lack them, the last line says so
            continue
    return pd.concat(parts) if parts else read_samples(loaded.directory(runs[0]))
