"""Decides the paper's claims C1-C5 by the rules of claims.yaml. What is measured: comparisons.py."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml

from analysis.intervals import Interval

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
NOTHING = Interval(np.nan, np.nan, np.nan, 0)


class Finding(NamedTuple):
    """One comparison behind a claim."""

    claim: str  # C1 ... C5
    comparison: str
    effect: Interval
    verdict: str
    why: str


def rules() -> dict:
    """Reads claims.yaml."""
    return yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf8"))


def decide(effect: Interval, rule: dict) -> tuple[str, str]:
    """Returns (verdict, why) of an effect by `supported_above` and `refuted_below`, or by `supported_below` alone."""
    if np.isnan(effect.estimate):
        return UNDECIDED, "not measured"
    if np.isnan(effect.low):
        return UNDECIDED, f"{effect.seeds} seed{'s' if effect.seeds != 1 else ''} give no interval; run at least 3"
    if "supported_below" in rule:
        bound = rule["supported_below"]
        supported, refuted = effect.high < bound, effect.low > bound
    else:
        bound = rule["supported_above"]
        supported, refuted = effect.low > bound, effect.high < rule["refuted_below"]
        supported &= "claimed" not in rule or effect.high >= rule["claimed"]
    if supported or refuted:
        return (SUPPORTED if supported else NOT_SUPPORTED), ""
    return UNDECIDED, "the interval does not decide; more seeds would narrow it"


def overall(findings: list[Finding]) -> tuple[str, str]:
    """Returns a claim's (verdict, why): supported if all its rows are, not supported if one is not, else undecided."""
    verdicts = [finding.verdict for finding in findings]
    if NOT_SUPPORTED in verdicts:
        return NOT_SUPPORTED, next(
            f"{f.comparison}: {f.why or f.effect}" for f in findings if f.verdict == NOT_SUPPORTED
        )
    if verdicts and set(verdicts) == {SUPPORTED}:
        return SUPPORTED, f"in all {len(verdicts)} comparisons"
    reasons = dict.fromkeys(finding.why for finding in findings if finding.verdict == UNDECIDED)
    supported = f"; supported in {verdicts.count(SUPPORTED)} of {len(verdicts)}" if SUPPORTED in verdicts else ""
    return UNDECIDED, "; ".join(reasons) + supported if reasons else "nothing to compare"


def findings_table(findings: list[Finding]) -> pd.DataFrame:
    """Returns a row per comparison, as the report shows it."""
    return pd.DataFrame(
        [
            {"claim": f.claim, "comparison": f.comparison, **f.effect._asdict(), "verdict": f.verdict, "why": f.why}
            for f in findings
        ]
    )


def verdicts(findings: list[Finding], rule: dict | None = None) -> pd.DataFrame:
    """Returns a row per claim: what it says, what is measured, the verdict and why."""
    rule = rule or rules()
    rows = []
    for claim in ("C1", "C2", "C3", "C4", "C5"):
        of_claim = [finding for finding in findings if finding.claim == claim]
        verdict, why = overall(of_claim)
        row = {"claim": claim, "says": rule[claim]["claim"], "measured": rule[claim]["effect"]}
        rows.append(row | weakest(of_claim, "supported_below" in rule[claim]) | {"verdict": verdict, "why": why})
    return pd.DataFrame(rows)


def weakest(findings: list[Finding], less_is_better: bool) -> dict:
    """Returns the comparison that supports a claim least: a claim is no better than that."""
    measured = [finding for finding in findings if not np.isnan(finding.effect.estimate)]
    if not measured:
        return {"effect": np.nan, "low": np.nan, "high": np.nan, "weakest comparison": "none was measured"}
    pick = max if less_is_better else min
    least = pick(measured, key=lambda finding: finding.effect.estimate)
    facts = {"effect": least.effect.estimate, "low": least.effect.low, "high": least.effect.high}
    return facts | {"weakest comparison": f"{least.comparison} ({least.effect.seeds} seeds; 1 of {len(findings)})"}
