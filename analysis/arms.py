"""Arms in tables and figures: how they are called, and what a table must hold before it is drawn.

Runs of two settings (analysis/runs/marks.py) never stand in one figure: `one_setting` refuses. Called by every figure.
"""

from __future__ import annotations

import pandas as pd

from otb.errors import RunError

LABELS = {
    "none": "no baseline",
    "group_mean": "group mean",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "opo": "OPO",
    "sequence_energy": "sequence energy",
    "otb": "OTB",
    "otb tail=carry": "OTB (carry)",
    "otb_loo": "OTB (leave-one-out)",
    "otb_carry_loo": "OTB (carry, leave-one-out)",
    "otb_exact": "OTB (exact norms)",
    "ob_exact": "optimal baseline (exact norms)",
    "sequence_energy_loo": "sequence energy (leave-one-out)",
    "value": "value model",
}


def label(baseline: str, group_size=None) -> str:
    """How an arm is called in figures."""
    name = LABELS.get(baseline, str(baseline).replace("_", " "))
    return name if group_size is None or pd.isna(group_size) else f"{name}, N={int(group_size)}"


def one_setting(table: pd.DataFrame) -> pd.DataFrame:
    """`table` without its outside runs' setting; raises RunError where it mixes settings or is empty."""
    if table.empty:
        raise RunError("No finished run to draw. Finish some runs, or use include=unfinished to draw them as they are.")
    found = sorted(set(table.setting.astype(str)) - {""})
    if len(found) > 1:
        raise RunError(
            f"The table mixes {len(found)} settings ({', '.join(found)}), which must not be averaged. Select one: "
            "table[table.setting == ...]; marks.setting_differences(runs) shows in which keys they differ."
        )
    return table


def require(table: pd.DataFrame, *columns: str) -> None:
    """Raises RunError where a metric is in no row, with the way to get it."""
    ways = {"total_power": "log_energy=true records it for every baseline"}
    ways |= dict.fromkeys(("gradient_noise", "gradient_signal"), "measure_gradient_noise=true records it")
    for column in columns:
        if column not in table or table[column].notna().sum() == 0:
            name = column.removeprefix("evaluation_")
            way = "evaluation.every=10 sets the evaluations" if name != column else "older versions did not record it"
            raise RunError(f"{column} is in none of these runs: {ways.get(column, way)}; run again.")


def require_grid(cells: set[tuple[str, int]], baselines: list[str], sizes: list[int]) -> None:
    """Raises RunError with the missing (baseline, group size) cells and the command that makes them."""
    missing = [(b, n) for b in baselines for n in sizes if (b, n) not in cells]
    if missing:
        shown = ", ".join(label(*cell) for cell in missing)
        commands = [f"python experiments/run.py -m {arm_override(b)} group_size={n} seed=0,1,2" for b, n in missing]
        total = len(baselines) * len(sizes)
        raise RunError(f"The grid lacks {len(missing)} of {total} cells: {shown}. Run: {'; '.join(commands)}")


def arm_override(baseline: str) -> str:
    """The command line's words for an arm: `otb tail=carry` -> baseline=otb baseline.tail=carry."""
    name, *arguments = str(baseline).split(" ")
    return " ".join([f"baseline={name}", *(f"baseline.{argument}" for argument in arguments)])


def seeds_text(seeds) -> str:
    """ "5 seeds", or "3-5 seeds" where arms differ: every figure says it."""
    low, high = min(seeds), max(seeds)
    return f"{low} seed{'s' if low != 1 else ''}" if low == high else f"{low}-{high} seeds"
