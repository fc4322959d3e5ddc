"""Makes the tables of one setting: accuracy, OTB against each arm, tokens to the target, stability. For parts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from analysis.arms import by_arm, label
from analysis.checks import require
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import bootstrap, difference, improvement, iqm
from analysis.stability import stability_table
from analysis.token_figure import tokens_by_arm
from otb.errors import RunError


def tables_of(table: pd.DataFrame, target: float | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields (title, rows) per table of a setting. One whose metrics are missing is left out; its figure says why."""
    makers: list[tuple[str, Callable]] = [
        (
            "Accuracy per arm (interquartile mean over seeds; best: the largest of noisy ones, too high)",
            accuracy_rows,
        ),
        ("OTB against each arm of the same N", comparison_rows),
    ]
    if target is not None:
        makers.append((f"Own tokens to {target:g} held-out accuracy", lambda rows: token_rows(rows, target)))
    makers.append(("Stability", stability_rows))
    for title, make in makers:
        try:
            yield title, make(table)
        except RunError:
            continue


def accuracy_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns accuracy per arm at the start, at the end, at best and on average, with intervals."""
    runs, rows = final_accuracy(table), []
    for _, _, text, arm in by_arm(runs):
        row = {"arm": text, "seeds": len(arm)}
        for column in ("first", "final", "best", "mean"):
            interval = bootstrap([arm[column].to_numpy()], iqm, bounds=(0, 1))
            row |= {column: interval.estimate, f"{column} low": interval.low, f"{column} high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def comparison_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns final accuracy of OTB minus each arm of its N (paired over shared seeds), and P(an OTB run is better)."""
    runs, rows = final_accuracy(table), []
    for size in sorted(runs.group_size.unique()):
        here = runs[runs.group_size == size]
        ours = by_seed(here[here.baseline == "otb"], "final")
        for baseline in [base for base, *_ in by_arm(here) if base != "otb"] if ours else []:
            theirs = by_seed(here[here.baseline == baseline], "final")
            gap = difference(ours, theirs)
            better = improvement(list(ours.values()), list(theirs.values()))
            row = {"OTB against": label(baseline, size), "shared seeds": len(ours.keys() & theirs.keys())}
            row |= {"difference": gap.estimate, "low": gap.low, "high": gap.high}
            rows.append(row | {"P(better)": better.estimate, "P low": better.low, "P high": better.high})
    return pd.DataFrame(rows)


def token_rows(table: pd.DataFrame, target: float) -> pd.DataFrame:
    """Returns tokens to the target per arm, with the interval of the mean."""
    require(table, "evaluation_accuracy", "evaluation_own_tokens_total")
    rows = tokens_by_arm(table, target, resamples=1000)
    rows.insert(0, "arm", [label(*pair) for pair in zip(rows.baseline, rows.group_size, strict=True)])
    return rows.drop(columns=["baseline", "group_size", "target"])


def stability_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Returns collapses, surges and drawdown per arm."""
    rows = []
    for _, _, text, arm in by_arm(stability_table(table)):
        row = {"arm": text, "seeds": len(arm), "collapsed": int(arm.collapsed.sum())}
        row |= {"steps with a surge": arm.surge_share.mean(), "worst drawdown, mean": arm.worst_drawdown.mean()}
        rows.append(row)
    return pd.DataFrame(rows)
