"""Makes the tables of one setting: the result, accuracy, tokens to the target, stability. For parts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from analysis.arms import by_arm, label
from analysis.checks import require
from analysis.group_size import by_seed, final_accuracy, final_words
from analysis.intervals import FEWEST, Interval, bootstrap, difference, improvement, iqm
from analysis.stability import stability_table
from analysis.token_figure import tokens_by_arm
from otb.errors import RunError


def tables_of(table: pd.DataFrame, target: float | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields (title, rows) per table of a setting. One whose metrics are missing is left out; its figure says why."""
    makers: list[tuple[str, Callable]] = [
        ("Accuracy per arm (interquartile mean over seeds; best: the largest of noisy ones, too high)", accuracy_rows)
    ]
    if target is not None:
        makers.append((f"Own tokens to {target:g} held-out accuracy", lambda rows: token_rows(rows, target)))
    makers.append(("Stability", stability_rows))
    for title, make in makers:
        try:
            yield title, make(table)
        except RunError:
            continue


def result_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns what most sweeps are run for: final accuracy per arm, and OTB's minus it.

    P(OTB is better) is the probability that a run of OTB ends above a run of the arm, ties counting half. Differences
    are between arms of the same N, paired over shared seeds. Raises RunError where nothing was evaluated.
    """
    runs, rows = final_accuracy(table), []
    for baseline, size, text, arm in by_arm(runs):
        values = arm.final.to_numpy()
        row = {"arm": text, "seeds": len(arm), "final accuracy": bootstrap([values], iqm, bounds=(0, 1))}
        ours = by_seed(runs[(runs.group_size == size) & (runs.baseline == "otb")], "final")
        if baseline != "otb" and ours:
            theirs = by_seed(arm, "final")
            row |= {"OTB minus this arm": difference(ours, theirs), "shared seeds": len(ours.keys() & theirs.keys())}
            row |= {"P(OTB is better)": improvement(list(ours.values()), list(theirs.values()))}
        rows.append(row)
    return pd.DataFrame(rows)


def result_note(table: pd.DataFrame) -> str:
    """Returns the sentence below `result_rows`: what is averaged, and what the intervals are."""
    runs = final_accuracy(table)
    seeds = runs.groupby(["baseline", "group_size"], observed=True).size()
    intervals = "95 % intervals over seeds in brackets"
    if seeds.min() < FEWEST:
        intervals += f"; an arm with fewer than {FEWEST} seeds has none"
    missing = table.run.nunique() - len(runs)
    left = f" {missing} of {table.run.nunique()} runs were not evaluated after step 0." if missing else ""
    return f"Final held-out accuracy: {final_words(runs)}, interquartile mean over seeds; {intervals}.{left}"


def accuracy_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns accuracy per arm before training, at the end, at best and on average, with intervals."""
    runs, rows = final_accuracy(table), []
    for _, _, text, arm in by_arm(runs):
        row = {"arm": text, "seeds": len(arm)}
        for name, column in (("before", "first"), ("final", "final"), ("best", "best"), ("mean", "mean")):
            row[name] = bootstrap([arm[column].to_numpy()], iqm, bounds=(0, 1))
        rows.append(row)
    return pd.DataFrame(rows)


def token_rows(table: pd.DataFrame, target: float) -> pd.DataFrame:
    """Returns tokens to the target per arm: restricted mean with its interval, median, and the horizon of the mean."""
    require(table, "evaluation_accuracy", "evaluation_own_tokens_total")
    rows = tokens_by_arm(table, target, resamples=1000)
    ends = zip(rows["mean"], rows.low, rows.high, rows.runs, strict=True)
    return pd.DataFrame(
        {
            "arm": [label(*pair) for pair in zip(rows.baseline, rows.group_size, strict=True)],
            "seeds": rows.runs,
            "reached": rows.reached,
            "mean own tokens": [Interval(*end) for end in ends],
            "median": rows["median"],
            "horizon": rows.horizon,
        }
    )


def stability_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns collapses, surges and drawdown per arm."""
    rows = []
    for _, _, text, arm in by_arm(stability_table(table)):
        row = {"arm": text, "seeds": len(arm), "collapsed": int(arm.collapsed.sum())}
        row |= {"steps with a surge": arm.surge_share.mean(), "worst drawdown, mean": arm.worst_drawdown.mean()}
        rows.append(row)
    return pd.DataFrame(rows)
