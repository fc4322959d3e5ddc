"""Reads rules.yaml and decides each claim: pure functions from intervals and counts to (verdict, why)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from analysis.intervals import Interval

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
NOTHING = Interval(np.nan, np.nan, np.nan, 0)
CLAIMS = ("C1", "C2", "C3", "C4", "C5")
RULES: dict = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf8"))
OURS, RIVAL, SMALL, LARGE = (RULES[name] for name in ("ours", "rival", "small", "large"))
SEEDS, RESAMPLES = RULES["seeds"], RULES["resamples"]


class Comparison(NamedTuple):
    """One comparison of a claim. task: of the study, "" in a report.

    verdict: "" where another comparison decides. original: the verdict under the original rule and why, if it differs.
    """

    claim: str
    task: str
    what: str
    effect: Interval
    verdict: str
    why: str
    original: str = ""


def judged_sizes(sizes: set[int]) -> tuple[int, int]:
    """Returns the small N and the large one, or the largest of `sizes` below it."""
    return SMALL, max([size for size in sizes if size <= LARGE] + [SMALL])


def decide_noise(effects: list[Interval]) -> str:
    """Returns the verdict on C1. effects: OTB's noise / the rival's, at every stage and both N."""
    bound = RULES["C1"]["less_noise"]
    if any(effect.low > bound for effect in effects):
        return NOT_SUPPORTED
    lower = all(effect.high < 1 and effect.estimate <= bound for effect in effects)
    return SUPPORTED if effects and lower else UNDECIDED


def decide_collapses(effect: Interval, rival: tuple[int, int], seeds: int) -> tuple[str, str]:
    """Returns (verdict, why) of C2.

    effect: share of collapsed runs, rival minus OTB. rival: (runs that collapsed, all runs). seeds: of each arm.
    """
    smallest = RULES["C2"]["smallest"]
    if seeds < SEEDS:
        return UNDECIDED, f"fewer than {SEEDS} seeds"
    if rival[0] < smallest * rival[1]:
        return UNDECIDED, "too few of the rival's runs collapsed, so nothing was put to the test"
    if effect.low > 0 and effect.estimate >= smallest:
        return SUPPORTED, ""
    return (NOT_SUPPORTED, "") if effect.high < smallest else (UNDECIDED, "")


def decide_accuracy(effect: Interval, control: Interval) -> tuple[str, bool]:
    """Returns (verdict, empty) of C3.

    effect: final accuracy, OTB at the small N minus the rival at the large one. control: the same of the rival itself;
    empty is true where it matches as well.
    """
    bound = -RULES["C3"]["matches"]
    if effect.low > bound:
        return SUPPORTED, bool(control.low > bound)
    return (NOT_SUPPORTED if effect.high < bound else UNDECIDED), False


def decide_saving(large: Interval, small: Interval) -> str:
    """Returns the verdict on C4 from the savings against the rival at its large and at its small N."""
    claimed, smallest = RULES["C4"]["claimed"], RULES["C4"]["smallest"]
    if large.high < claimed or small.high < smallest:
        return NOT_SUPPORTED
    return SUPPORTED if large.low > 0 and small.low > 0 else UNDECIDED


def decide_saving_within_bounds(large: Interval, small: Interval, bounded: tuple[bool, bool]) -> tuple[str, str]:
    """Returns (verdict, original) of C4, where a saving that is only a lower bound refutes nothing.

    bounded: which of the two savings is a lower bound. original: the verdict of the original rule, "" if the same.
    """
    verdict = decide_saving(large, small)
    opened = [
        effect._replace(high=np.inf) if is_bound else effect
        for effect, is_bound in zip((large, small), bounded, strict=True)
    ]
    if verdict == NOT_SUPPORTED != decide_saving(*opened):
        return UNDECIDED, NOT_SUPPORTED
    return verdict, ""


def decide_cost(effect: Interval) -> str:
    """Returns the verdict on C5. effect: time of the advantages / time of the loss's forward and backward."""
    most = RULES["C5"]["most"]
    return SUPPORTED if effect.high < most else NOT_SUPPORTED if effect.low > most else UNDECIDED
