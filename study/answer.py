"""Writes the answer so far, a grid of claims x tasks with a word and a number in each cell, for the front pages."""

from __future__ import annotations

import math

import pandas as pd

from analysis.arms import label
from analysis.claims.rules import CLAIMS, NOT_SUPPORTED, SUPPORTED, Comparison
from analysis.claims.runs import LOWER_BOUND, OURS_SMALL, RIVAL_LARGE, RIVAL_SMALL
from analysis.intervals import Interval
from analysis.report.markdown import markdown_table
from study.collected import REAL

WORDS = {SUPPORTED: "**yes**", NOT_SUPPORTED: "**no**"}
TASKS = {
    "arithmetic": "short (17-24 tokens)",
    "arithmetic_tools": "with Python tool",
    "arithmetic_long": "long (178 tokens)",
}
ROWS = {
    "C1": "C1 lower gradient noise, OTB / RLOO",
    "C2": "C2 does not collapse where RLOO does",
    "C3": "C3 OTB at N = 4 matches RLOO at N = 32",
    "C4": "C4 62 % fewer tokens than RLOO at N = 32",
    "C5": "C5 no extra backward pass",
}


def effect_text(effect: Interval) -> str:
    """Returns an effect with its interval: two decimals, three where it is small or precise; or "not measured"."""
    if math.isnan(effect.estimate):
        return "not measured"
    if math.isnan(effect.low):
        return f"{effect.estimate:.2g}"
    width = effect.high - effect.low
    digits = 3 if 0 < width < 0.04 or max(map(abs, effect[:3])) < 0.1 else 2
    estimate, low, high = (f"{value + 0.0:.{digits}f}" for value in rounded(effect, digits))
    return f"{estimate} [{low}, {high}]"


def rounded(effect: Interval, digits: int) -> tuple[float, ...]:
    """Returns estimate, low and high to so many decimals, without a negative zero."""
    return tuple(round(value, digits) + 0.0 for value in effect[:3])


def percent(effect: Interval) -> str:
    """Returns a share with its interval in percent: "74 % [70, 78]"."""
    return "{:.0f} % [{:.0f}, {:.0f}]".format(*(100 * value for value in effect[:3]))


def answer(found: list[Comparison]) -> str:
    """Returns the grid with its footnotes."""
    deciding = {(c.claim, c.task): c for c in found if c.verdict}
    rows = []
    for claim in CLAIMS:
        cells = {words: cell(deciding.get((claim, task)), claim) for task, words in TASKS.items()}
        rows.append({"claim": ROWS[claim]} | cells)
    notes = [note for note in (of_small_n(found), of_real_model(found)) if note]
    return "\n\n".join([markdown_table(pd.DataFrame(rows)), *notes])


def cell(found: Comparison | None, claim: str) -> str:
    """Returns a word and a number."""
    if found is None:
        return "" if claim == "C5" else "not run"
    word = WORDS.get(found.verdict, "open")
    if math.isnan(found.effect.estimate):
        return word
    if claim == "C5":
        return f"{word}, {found.effect.estimate:.1f} of the time of loss forward + backward"
    if claim != "C4":
        return f"{word} {effect_text(found.effect)}"
    if found.why.endswith(LOWER_BOUND):
        return f"{word}, at least {found.effect.estimate:.0%}".replace("%", " %")
    return f"{word} {percent(found.effect)} (1)"


def of_small_n(found: list[Comparison]) -> str:
    """Returns the footnote on how much of C4's saving comes from N alone, "" where no task has a whole saving."""
    at = {(c.task, c.what.partition(", to 90% of the best")[0]): c.effect for c in found if c.claim == "C4"}
    small, large, ours = label(*RIVAL_SMALL), label(*RIVAL_LARGE), label(*OURS_SMALL)
    whole = {c.task: c for c in found if c.claim == "C4" and c.verdict and not c.why.endswith(LOWER_BOUND)}
    tasks = [task for task in TASKS if task in whole and (task, f"{small} against {large}") in at]
    alone = [f"{at[task, f'{small} against {large}'].estimate * 100:.0f} %" for task in tasks]
    equal = [f"{at[task, f'{ours} against {small}'].estimate * 100:.0f} %" for task in tasks]
    if not tasks:
        return ""
    also = f"(1) Mostly because N is smaller: RLOO at N = 4 alone already saves {' and '.join(alone)}."
    return f"{also} At equal N, OTB saves {' and '.join(equal)}."


def of_real_model(found: list[Comparison]) -> str:
    """Returns the footnote on the real language model, "" where it was not measured."""
    what = f"start: {label(*OURS_SMALL)} relative to {label(*RIVAL_SMALL)}"
    ratio = [c.effect for c in found if (c.claim, c.task, c.what) == ("C1", REAL, what)]
    if not ratio:
        return ""
    return (
        f"On a 4-bit copy of SmolLM2-135M the ratio is {effect_text(ratio[0])} at N = 4, before training. "
        "A verdict needs three policies; this is one."
    )
