"""Makes the first screen of a report: the result per arm and its figure, what was run, the verdicts. For page.py."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import label
from analysis.report.parts import Part
from analysis.runs.load import Runs
from analysis.style import seeds_text

INTERVAL = "effect [95 % interval]"  # the column of the verdicts


def lead(loaded: Runs) -> str:
    """Returns the first sentence of the page: how many runs there are, and how many of them it uses."""
    count, used = len(loaded.runs), int((loaded.runs.left_out == "").sum())
    rest = "all of them used." if used == count else f"{used:,} of them used; the last table says why others are not."
    return f"{count:,} run{'s' if count != 1 else ''}, {rest}"


def overview(loaded: Runs, parts: list[Part]) -> pd.DataFrame:
    """Returns what was run, a row per setting: arms, group sizes, seeds, steps, and runs used."""
    rows = []
    for part in parts:
        runs = loaded.runs[(loaded.runs.setting == part.setting) & (loaded.runs.left_out == "")]
        row = {"setting": part.name, "arms": "plain TRL", "N": ""}
        row |= {"seeds per arm": "", "steps": listed(runs.last_step)}
        if part.setting:
            arms = dict.fromkeys(label(arm) for arm in sorted(runs.baseline.astype(str), key=lambda arm: arm != "otb"))
            seeds = runs.groupby(["baseline", "group_size"]).seed.nunique()
            row |= {"arms": ", ".join(arms), "N": listed(runs.group_size)}
            row |= {"seeds per arm": seeds_text(seeds) if len(seeds) else ""}
        if "learning_rate" in runs:
            row["learning rate"] = listed(runs.learning_rate)
        rows.append(row | {"runs": len(runs)})
    return pd.DataFrame(rows)


def listed(values: pd.Series) -> str:
    """Returns the different numbers of a column, ascending: "4, 16"; the ends alone where there are more than five."""
    numbers = [f"{value:g}" for value in sorted(values.dropna().unique())]
    return ", ".join(numbers) if len(numbers) <= 5 else f"{numbers[0]} to {numbers[-1]}"


def verdict_rows(parts: list[Part]) -> pd.DataFrame:
    """Returns a row per claim and setting in which a rival was run: what it says, effect, interval and verdict."""
    rows = []
    for part in [part for part in parts if part.has_rival]:
        for claim in part.claims.to_dict("records"):
            row = {"setting": part.name} if len(parts) > 1 else {}
            row |= {"claim": claim["claim"], "says": claim["says"], "verdict": claim["verdict"]}
            rows.append(row | {INTERVAL: interval_text(claim), "measured": claim["measured"]})
    return pd.DataFrame(rows)


def interval_text(claim: dict) -> str:
    """Returns "0.05 [−0.32, 0.23]", the estimate alone without an interval; says of a proxy that it is one."""
    estimate, low, high = (claim[key] for key in ("effect", "low", "high"))
    if np.isnan(estimate):
        return "not measured"
    text = f"{estimate:.3g}" if np.isnan(low) else f"{estimate:.3g} [{low:.3g}, {high:.3g}]"
    return text.replace("-", "−") + (", of a proxy" if "(proxy)" in claim["compared"] else "")


def main_part(loaded: Runs, parts: list[Part]) -> Part:
    """Returns the part that the first screen shows: one with a rival if there is any, then the one with most runs."""
    count = loaded.runs[loaded.runs.left_out == ""].setting.value_counts()
    return max(parts, key=lambda part: (part.has_rival, not part.result.empty, count.get(part.setting, 0)))
