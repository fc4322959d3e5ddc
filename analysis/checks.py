"""The checks that every figure makes before it draws: one setting, no missing metric, no missing cell of a grid.

Runs of two settings (analysis/runs/marks.py) never stand in one figure. Every refusal is a RunError that says the fix.
"""

from __future__ import annotations

import pandas as pd

from analysis.arms import arm_override, label
from otb.errors import RunError

WAYS = {  # metric -> how to get it, where that is not obvious from its name
    "total_power": "log_energy=true records it for every baseline",
    "gradient_noise": "measure_gradient_noise=true records it",
    "gradient_signal": "measure_gradient_noise=true records it",
}


def one_setting(table: pd.DataFrame) -> pd.DataFrame:
    """Returns `table` as it is. Raises RunError where it mixes settings or is empty."""
    if table.empty:
        raise RunError(
            "No finished run to draw. Finish some runs, or add --include unfinished to draw them as they are."
        )
    settings = sorted(set(map(str, table.setting.unique())) - {""})  # "": a plain TRL run, which has none
    if len(settings) > 1:
        raise RunError(
            f"The table mixes {len(settings)} settings ({', '.join(settings)}), which must not be averaged. Select "
            "one: table[table.setting == ...]; marks.setting_differences(runs) shows in which keys they differ."
        )
    return table


def require(table: pd.DataFrame, *metrics: str) -> None:
    """Raises RunError where no row has a value of one of `metrics`, with the way to get it."""
    for metric in metrics:
        if metric not in table or table[metric].notna().sum() == 0:
            of_evaluation = metric.startswith("evaluation_")
            usual = "evaluation.every=10 sets the evaluations" if of_evaluation else "older versions did not record it"
            raise RunError(f"{metric} is in none of these runs: {WAYS.get(metric, usual)}; run again.")


def require_grid(cells: set[tuple[str, int]], baselines: list[str], sizes: list[int]) -> None:
    """Raises RunError with the missing (baseline, group size) cells and the command that makes them."""
    missing = [(baseline, size) for baseline in baselines for size in sizes if (baseline, size) not in cells]
    if missing:
        names = ", ".join(label(*cell) for cell in missing)
        commands = [f"python experiments/run.py -m {arm_override(b)} group_size={n} seed=0,1,2" for b, n in missing]
        total = len(baselines) * len(sizes)
        raise RunError(f"The grid lacks {len(missing)} of {total} cells: {names}. Run: {'; '.join(commands)}")


def require_columns(measurement: pd.DataFrame, *columns: str) -> None:
    """Raises RunError where a table of the variance laboratory lacks a column that is to be drawn."""
    if missing := [column for column in columns if column not in measurement]:
        raise RunError(
            f"The measurement has no {', '.join(missing)}. Run experiments/variance.py again: it writes its tables "
            "anew and measures nothing twice."
        )
