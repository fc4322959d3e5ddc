"""Compares the arms of one setting for the claims C2 to C4: effects with intervals, and the verdict of rules.py."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import by_arm, label
from analysis.claims.rules import (
    LARGE,
    NOTHING,
    OURS,
    RESAMPLES,
    RIVAL,
    RULES,
    SEEDS,
    SMALL,
    UNDECIDED,
    Comparison,
    decide_accuracy,
    decide_collapses,
    decide_saving_within_bounds,
)
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import Interval, difference, improvement, share_difference
from analysis.token_consumption import Consumption, arrives, consumption, horizon, is_lower_bound, saving
from otb.errors import RunError

Arm = tuple[str, int]  # baseline, N
OURS_SMALL, RIVAL_SMALL, RIVAL_LARGE = (OURS, SMALL), (RIVAL, SMALL), (RIVAL, LARGE)
LOWER_BOUND = "a lower bound"
FORMER_RULE_OF_C4 = "it let a saving that is only a lower bound refute the claim"


class Runs:
    """The runs of one setting: final accuracies, tokens to a target and collapses of each arm.

    table: a row per run and step, as `analysis.runs.load.load` returns it. name: of the setting, for the comparisons.
    Raises RunError where an arm has two runs of one seed, or none was evaluated.
    """

    def __init__(self, table: pd.DataFrame, name: str):
        self.task, self.table = name, table
        runs = table.drop_duplicates("run")
        if len(twice := runs[runs.duplicated(["baseline", "group_size", "seed"])]):
            run = twice.iloc[0]
            raise RunError(
                f"{label(run.baseline, run.group_size)} has two runs of seed {run.seed} on {name}, and one of them has "
                "other settings. Compare the runs of one setting."
            )
        final = final_accuracy(table)
        self.finals = {(baseline, int(size)): by_seed(rows, "final") for baseline, size, _, rows in by_arm(final)}
        self.consumptions: dict[tuple[Arm, float], Consumption] = {}  # several comparisons use each

    def consumption(self, arm: Arm, target: float) -> Consumption:
        """Returns the own tokens of one arm's runs until a target accuracy."""
        if (arm, target) not in self.consumptions:
            of_arm = self.table[(self.table.baseline == arm[0]) & (self.table.group_size == arm[1])]
            self.consumptions[arm, target] = consumption(of_arm, target)
        return self.consumptions[arm, target]

    def has(self, *arms: Arm) -> bool:
        """Tells whether all of these arms have runs."""
        return self.finals.keys() >= set(arms)

    @property
    def best(self) -> Arm:
        """Returns the arm with the highest mean final accuracy."""
        return max(self.finals, key=self.mean_final)

    def mean_final(self, arm: Arm) -> float:
        """Returns the mean over seeds of an arm's final accuracy."""
        return float(np.mean(list(self.finals[arm].values())))

    @property
    def best_final(self) -> float:
        """Returns the mean final accuracy of the best arm."""
        return self.mean_final(self.best)

    @property
    def start(self) -> float:
        """Returns the mean accuracy of the first evaluation."""
        evaluated = self.table[self.table.evaluation_accuracy.notna()].sort_values("step")
        return float(evaluated.groupby("run", observed=True).evaluation_accuracy.first().mean())

    def lacking(self, *arms: Arm) -> str:
        """Returns what keeps a comparison of these arms from a verdict, "" if nothing does."""
        counts = {arm: len(self.finals.get(arm, {})) for arm in arms}
        short = [f"{label(*arm)}: {count}" for arm, count in counts.items() if count < SEEDS]
        return f"fewer than {SEEDS} seeds ({', '.join(short)})" if short else ""


# ---- C2


def compare_collapses(name: str, counts: dict[str, tuple[int, int]], arm: str, seeds: int) -> Comparison:
    """Compares the shares of collapsed runs for C2: the rival minus another arm. Decided for OTB.

    counts: baseline -> (runs that collapsed, all runs).
    """
    what = " minus ".join(f"{label(one)} ({counts[one][0]} of {counts[one][1]})" for one in (RIVAL, arm))
    effect = share_difference(counts[RIVAL], counts[arm])._replace(seeds=seeds)
    verdict, why = decide_collapses(effect, counts[RIVAL], seeds) if arm == OURS else ("", "")
    return Comparison("C2", name, what, effect, verdict, why)


# ---- C3


def compare_final(runs: Runs) -> Comparison:
    """Compares final accuracies for C3: OTB at the small N minus the rival at the large one."""
    verdict, why = UNDECIDED, runs.lacking(OURS_SMALL, RIVAL_LARGE)
    effect = differing(runs, OURS_SMALL, RIVAL_LARGE)
    if not why:
        control = differing(runs, RIVAL_SMALL, RIVAL_LARGE)
        verdict, empty = decide_accuracy(effect, control)
        why = f"empty: {label(*RIVAL_SMALL)} matches {label(*RIVAL_LARGE)} as well, {control}" if empty else ""
    why = "; ".join(filter(None, [why, improvement_text(runs, OURS_SMALL, RIVAL_LARGE)]))
    return Comparison("C3", runs.task, f"{label(*OURS_SMALL)} minus {label(*RIVAL_LARGE)}", effect, verdict, why)


def differing(runs: Runs, ours: Arm, theirs: Arm) -> Interval:
    """Returns the difference of final accuracies, paired by seed."""
    return (
        difference(runs.finals[ours], runs.finals[theirs], resamples=RESAMPLES) if runs.has(ours, theirs) else NOTHING
    )


def improvement_text(runs: Runs, ours: Arm, theirs: Arm) -> str:
    """Returns the probability that a run of ours ends higher than one of theirs, in words."""
    return better_text(runs.finals[ours], runs.finals[theirs]) if runs.has(ours, theirs) else ""


def better_text(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Returns the probability of improvement in words. ours, theirs: seed -> final accuracy."""
    better = improvement(list(ours.values()), list(theirs.values()), resamples=RESAMPLES)
    return f"probability of improvement {better}"


# ---- C4


def target_of(runs: Runs, share: float = RULES["C4"]["targets"][0]) -> float:
    """Returns the target accuracy of C4, a share of the best arm's mean final accuracy."""
    return share * runs.best_final


def compare_tokens(runs: Runs, target: float | None = None) -> Comparison:
    """Compares tokens to the target for C4: OTB at the small N against the rival at the large one, and at its own N.

    target: None for the one in the rules.
    """
    chosen, target = target is not None, target_of(runs) if target is None else target
    large, small = (saved(runs, OURS_SMALL, arm, target) for arm in (RIVAL_LARGE, RIVAL_SMALL))
    censored = censored_text((runs, OURS_SMALL), (runs, RIVAL_LARGE), target)
    others = sorted(
        set(runs.finals) - {OURS_SMALL, RIVAL_LARGE, RIVAL_SMALL}
    )  # each may be the best: it sets the target
    verdict, original = UNDECIDED, ""
    lacks = runs.lacking(OURS_SMALL, RIVAL_LARGE, RIVAL_SMALL, *([] if chosen else others))
    lacks = lacks or little_learned(runs, target)
    if not lacks:
        ours = runs.consumption(OURS_SMALL, target)
        bounded = [is_lower_bound(ours, runs.consumption(arm, target)) for arm in (RIVAL_LARGE, RIVAL_SMALL)]
        verdict, former = decide_saving_within_bounds(large, small, (bounded[0], bounded[1]))
        original = f"{former}, because {FORMER_RULE_OF_C4}" if former else ""
        alone = f"{label(*RIVAL_SMALL)} alone saves {saved(runs, RIVAL_SMALL, RIVAL_LARGE, target)}"
        censored = f"against {label(*RIVAL_SMALL)}: {small}; {alone}; {censored}"
    best = f"{target:.3f}" if chosen else f"{RULES['C4']['targets'][0]:.0%} of the best ({best_text(runs, target)})"
    what = f"{label(*OURS_SMALL)} against {label(*RIVAL_LARGE)}, to {best}"
    return Comparison("C4", runs.task, what, large, verdict, "; ".join(filter(None, [lacks, censored])), original)


def best_text(runs: Runs, target: float) -> str:
    """Returns which arm is the best, and the target that follows, in words."""
    return f"{label(*runs.best)}: {target:.3f}"


def little_learned(runs: Runs, target: float) -> str:
    """Returns why tokens to a target say little, "" where it lies well above the start."""
    if target >= runs.start + RULES["C4"]["learned"] * (runs.best_final - runs.start):
        return ""
    return f"the target is too near to the start, {runs.start:.3f}, for tokens to it to say much"


def saved(runs: Runs, ours: Arm, theirs: Arm, target: float) -> Interval:
    """Returns the share of their tokens to the target that ours saves."""
    if not runs.has(ours, theirs):
        return NOTHING
    return saving(runs.consumption(ours, target), runs.consumption(theirs, target), resamples=RESAMPLES)


def censored_text(ours: tuple[Runs, Arm], theirs: tuple[Runs, Arm], target: float) -> str:
    """Returns how many runs of two arms never reached the target, and where that cuts their comparison off."""
    if lacking := [f"{label(*arm)} was not run" for runs, arm in (ours, theirs) if not runs.has(arm)]:
        return ", ".join(lacking)
    reaching = {label(*arm): runs.consumption(arm, target) for runs, arm in (ours, theirs)}
    found = [
        f"{(~arm.reached).sum()} of {len(arm.reached)} runs of {name} censored"
        for name, arm in reaching.items()
        if not arm.reached.all()
    ]
    limit = horizon(*reaching.values())
    for name, arm in reaching.items():
        if arm.reached.any() and not arrives(arm, limit):
            found.append(f"cut off at {limit / 1e3:.0f}k tokens, before any run of {name} gets there")
    measured = any(arm.reached.any() for arm in reaching.values())  # else nothing is said, and nothing bounded
    bound = f": {LOWER_BOUND}" if measured and is_lower_bound(*reaching.values()) else ""
    return (", ".join(found) or "no run censored") + bound
