"""Chooses the learning rate of each arm of the study from its search.

study/run.py writes them after a search, and so does `python -m study rates`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from otb.errors import RunError
from otb.files import write_atomically
from study.collected import numbers, read

RATES = Path(__file__).with_name("rates.yaml")
SEARCH = "claim_rates"  # what the names of recipes that search, and of their rows, begin with
SEEDS = 2  # of a search, on each of its rates
FEWEST = 3  # rates; of an arm with fewer the search is not done
TIE = 0.001  # of accuracy: the smaller rate is taken
HEADER = """\
# Written by `python -m study rates` from study/rows/claim_rates*.csv; the rule is in study/rules.md.
# Task, arm, N: learning rate.
"""


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns task, baseline, group_size, learning_rate, score, seeds: mean held-out accuracy after the start.

    A run that diverged keeps its last evaluation to the end.
    """
    accuracies = [numbers(cell) for cell in rows.evaluation_accuracy]
    ends = rows.assign(count=[len(values) for values in accuracies]).groupby("task")["count"].transform("max")
    padded = [np.pad(values, (0, end - len(values)), mode="edge") for values, end in zip(accuracies, ends, strict=True)]
    scored = rows.assign(score=[values[1:].mean() for values in padded])
    groups = scored.groupby(["task", "baseline", "group_size", "learning_rate"])
    return groups.score.agg(["mean", "size"]).set_axis(["score", "seeds"], axis=1).reset_index()


def chosen(searched: pd.DataFrame) -> pd.DataFrame:
    """Returns the row of `scores` of the rate that each arm gets, with `edge`: whether it is an end of its list.

    An arm gets none before both seeds of `FEWEST` rates have run, nor where the best of just these is an end of the
    list: the rules ask for the next one first.
    """
    best = []
    for _, arm in searched[searched.seeds >= SEEDS].groupby(["task", "baseline", "group_size"]):
        arm = arm.sort_values("learning_rate", ignore_index=True)
        row = arm[arm.score >= arm.score.max() - TIE].iloc[0]
        edge = row.learning_rate in (arm.learning_rate.min(), arm.learning_rate.max())
        if len(arm) > FEWEST or (len(arm) == FEWEST and not edge):
            best.append(row.to_dict() | {"edge": edge})
    return pd.DataFrame(best, columns=[*searched.columns, "edge"])


def write_rates(files: list[Path], target: Path = RATES) -> pd.DataFrame:
    """Writes the chosen rates of all rows of a search as yaml and returns `chosen`."""
    best = chosen(scores(pd.concat([read(file) for file in files], ignore_index=True)))
    tree: dict = {}
    for row in best.to_dict("records"):
        arm = tree.setdefault(row["task"], {}).setdefault(row["baseline"], {})
        arm[int(row["group_size"])] = float(row["learning_rate"])
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, HEADER + yaml.safe_dump(tree))
    return best


def tuned_rate(task: str, baseline: str, group_size: int, source: Path = RATES) -> float:
    """Returns the rate of an arm. Raises RunError where the search has not been run for it."""
    known = yaml.safe_load(source.read_text(encoding="utf8")) if source.exists() else {}
    try:
        return known[task][baseline][group_size]
    except KeyError:
        raise RunError(
            f"The study has no learning rate for task={task} baseline={baseline} group_size={group_size}. Run its "
            "search, a recipe claim_rates* of python -m study; if that is done, its best rate is an end of "
            "the list, and the next one has to be tried."
        ) from None
