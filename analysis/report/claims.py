"""Decides the claims C1 to C5 on the runs of one setting, with the rules of analysis/claims. parts.py calls it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis.arms import arm_override, label
from analysis.claims.rules import (
    CLAIMS,
    NOTHING,
    OURS,
    RESAMPLES,
    RIVAL,
    RULES,
    SEEDS,
    SMALL,
    UNDECIDED,
    Comparison,
    decide_cost,
    decide_noise,
    judged_sizes,
)
from analysis.claims.runs import (
    OURS_SMALL,
    RIVAL_LARGE,
    RIVAL_SMALL,
    Arm,
    Runs,
    compare_collapses,
    compare_final,
    compare_tokens,
)
from analysis.cost import cost_table
from analysis.group_size import by_seed
from analysis.intervals import FEWEST, Interval, bootstrap, iqm, two_arms
from analysis.noise import is_measured, noise_to_signal_per_run, power_per_run
from analysis.stability import stability_table
from otb.errors import RunError

PROXY = " (proxy)"
UNMEASURED = (
    "one arm has no measured noise, or a signal that drowned in it: measure_gradient_noise=true, more steps or more "
    "prompts_per_step"
)


def decisions(table: pd.DataFrame, target: float | None) -> list[Comparison]:
    """Returns the comparison that decides each claim; one that cannot be made says what it lacks.

    table: rows of one setting, of `load(...).used`. target: accuracy for C4, None for the one in the rules.
    """
    asked: list[tuple[tuple[Arm, ...], Callable[[], Comparison]]] = [
        ((OURS_SMALL, RIVAL_SMALL), lambda: noise(table)),
        ((OURS_SMALL, RIVAL_SMALL), lambda: collapses(table)),
        ((OURS_SMALL, RIVAL_LARGE), lambda: compare_final(Runs(table, ""))),
        ((OURS_SMALL, RIVAL_LARGE, RIVAL_SMALL), lambda: compare_tokens(Runs(table, ""), target)),
        ((OURS_SMALL,), lambda: cost(table)),
    ]
    found = []
    for claim, (needed, compare) in zip(CLAIMS, asked, strict=True):
        try:
            found.append(lacking(claim, table, needed) or compare())
        except RunError as error:
            found.append(Comparison(claim, "", "", NOTHING, UNDECIDED, str(error)))
    return found


def lacking(claim: str, table: pd.DataFrame, needed: tuple[Arm, ...]) -> Comparison | None:
    """Returns the comparison that says which arms have no run, and the command for them; None where all have some."""
    present = {(baseline, int(size)) for baseline, size in zip(table.baseline, table.group_size, strict=True)}
    missing = [arm for arm in needed if arm not in present]
    if not missing:
        return None
    seeds = ",".join(map(str, range(SEEDS)))
    commands = "; ".join(f"{arm_override(baseline)} group_size={size} seed={seeds}" for baseline, size in missing)
    names = ", ".join(label(*arm) for arm in missing)
    why = f"no finished run of {names}. Run: python experiments/run.py -m {commands}"
    return Comparison(claim, "", " against ".join(label(*arm) for arm in needed), NOTHING, UNDECIDED, why)


def of_arm(frame: pd.DataFrame, arm: Arm) -> pd.DataFrame:
    """Returns the rows of one arm."""
    return frame[(frame.baseline == arm[0]) & (frame.group_size == arm[1])]


def noise(table: pd.DataFrame) -> Comparison:
    """Compares measured noise / signal for C1 where it was recorded, else the proxy, which decides nothing.

    The ratio does not depend on an advantage's scale.
    """
    measured = is_measured(table)
    power = noise_to_signal_per_run(table) if measured else power_per_run(table)
    runs = table.drop_duplicates("run")[["run", "baseline", "group_size", "seed"]]
    runs = runs.assign(power=runs.run.astype(str).map(power)).dropna(subset="power")
    sizes = {int(size) for size in table[table.baseline == RIVAL].group_size}
    sizes &= {int(size) for size in table[table.baseline == OURS].group_size}
    effects, short = {}, []
    for size in sorted(set(judged_sizes(sizes))):
        ours, theirs = (by_seed(of_arm(runs, (baseline, size)), "power") for baseline in (OURS, RIVAL))
        if not ours or not theirs:
            what = f"{label(OURS, size)} against {label(RIVAL, size)}"
            return Comparison("C1", "", what, NOTHING, UNDECIDED, UNMEASURED)
        scale = 1.0 if measured else ((size - 1) / size) ** 2  # the proxy depends on it: RLOO's advantage is larger
        logs = two_arms(ours, theirs, lambda a, b, s=scale: iqm(np.log(a)) - iqm(np.log(s * b)), resamples=RESAMPLES)
        effects[size] = Interval(np.exp(logs.estimate), np.exp(logs.low), np.exp(logs.high), logs.seeds)
        if logs.seeds < SEEDS:
            short.append(f"N={size}: {logs.seeds}")
    worst = max(effects, key=lambda size: effects[size].estimate)
    what = f"{label(OURS)} relative to {label(RIVAL)} at its noisiest: N={worst}" + ("" if measured else PROXY)
    verdict, why = decide_noise(list(effects.values())), ""
    if not measured:
        verdict = UNDECIDED
        why = "only the proxy was recorded, which is no variance: measure it with experiments/variance.py"
    elif short:
        verdict, why = UNDECIDED, f"fewer than {SEEDS} seeds ({', '.join(short)})"
    return Comparison("C1", "", what, effects[worst], verdict, why)


def collapses(table: pd.DataFrame) -> Comparison:
    """Compares the shares of collapsed runs for C2 at the small N."""
    runs = stability_table(table)
    arms = {baseline: of_arm(runs, (baseline, SMALL)) for baseline in (OURS, RIVAL)}
    counts = {baseline: (int(arm.collapsed.sum()), len(arm)) for baseline, arm in arms.items()}
    return compare_collapses("", counts, OURS, min(arm.seed.nunique() for arm in arms.values()))


def cost(table: pd.DataFrame) -> Comparison:
    """Compares the time of the advantages with the time of the loss for C5."""
    arm = of_arm(cost_table(table), OURS_SMALL).dropna(subset=["advantage_ratio"])
    if arm.empty:
        raise RunError(f"{label(*OURS_SMALL)} has no times of a step in its rows.")
    effect = bootstrap([arm.advantage_ratio.to_numpy()], iqm, resamples=RESAMPLES)
    why = f"{iqm(arm.advantage_share.to_numpy()):.2g} of the time of a step"
    if effect.seeds < FEWEST:
        why = f"fewer than {FEWEST} seeds give no interval; {why}"
    return Comparison("C5", "", label(*OURS_SMALL), effect, decide_cost(effect), why)


def claims_table(found: list[Comparison]) -> pd.DataFrame:
    """Returns a row per claim: what it says, what is measured, the effect, the verdict and why."""
    return pd.DataFrame(
        [
            {"claim": c.claim, "says": RULES[c.claim]["says"], "measured": RULES[c.claim]["measured"]}
            | {"effect": c.effect.estimate, "low": c.effect.low, "high": c.effect.high, "seeds": c.effect.seeds}
            | {"compared": c.what, "verdict": c.verdict, "why": c.why}
            for c in found
        ]
    )
