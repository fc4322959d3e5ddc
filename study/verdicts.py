"""Speaks the verdicts of the study by the rules of study/rules.md, from the rows of its runs.

One function per claim; each returns the comparison that speaks the verdict first, and after it those that stand beside
it without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.arms import by_arm, label
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import Interval, difference, improvement, share_difference
from analysis.report.claims import NOT_SUPPORTED, NOTHING, SUPPORTED, UNDECIDED, decide
from analysis.stability import stability_table
from analysis.token_consumption import Consumption, arrives, consumption, horizon, is_lower_bound, median_saving, saving
from otb.errors import RunError
from study.collected import FIXED, steps_table

OURS, RIVAL, SMALL, LARGE = "otb", "rloo", 4, 32
SEEDS = 10  # of each arm, below which there is no verdict
RESAMPLES = 100_000  # of intervals over seeds; of 2,000 the ends that are judged differ by .02 between bootstrap seeds
STAGES, POLICIES = ("start", "half", "end"), 3  # C1: at which policies are measured, and how many of them
LESS_NOISE = 0.9  # C1: noise relative to the rival's, below which it is less by an effect worth the name
MATCHES = 0.02  # C3: not worse by so much accuracy
CLAIMED_SAVING, SMALLEST_SAVING = 0.62, 0.10  # C4
TARGETS = (0.9, 0.8, 0.95)  # C4: shares of the best final accuracy, the first decides
LEARNED = 0.5  # C4: of the best arm's gain over the start, at which the deciding target must lie
OVERHEAD = "score norms, baseline and advantages / loss of a plain step"  # C5: names of figures of benchmarks/bench.py
LEAN_STEP = "step: otb / rloo, N=4"
MOST_OF_LOSS = 0.5  # C5: of the loss's time, what the claim allows
CONDITIONS = 30  # C2: rates x samplers x (one update, or 2 and 4 with and without clipping)
SETTING = ["learning_rate", "varied"]  # C2: columns that tell its settings apart
SMALLEST_COLLAPSE = 0.2  # C2: difference of the shares of collapsed runs, and share of the rival's that must collapse

Arm = tuple[str, int]


class Comparison(NamedTuple):
    """One comparison of a claim on a task. verdict: "" where it stands beside the one that decides."""

    claim: str
    task: str
    what: str
    effect: Interval
    verdict: str
    why: str


class Runs:
    """The runs of one task: final accuracies, tokens to a target and collapses of each arm. rows: of study.

    Raises RunError where an arm has two runs of one seed, such as rows of a learning rate that was chosen before.
    """

    def __init__(self, rows: pd.DataFrame):
        self.task = str(rows.task.iloc[0])
        if len(twice := rows[rows.duplicated(["baseline", "group_size", "seed"])]):
            run = twice.iloc[0]
            raise RunError(
                f"{label(run.baseline, run.group_size)} has two rows of seed {run.seed} on {self.task}: one of them is "
                "of other settings. Delete those that study/rates.yaml does not name."
            )
        self.table = steps_table(rows)
        final = final_accuracy(self.table)
        self.finals = {(baseline, int(size)): by_seed(rows, "final") for baseline, size, _, rows in by_arm(final)}
        self.consumptions: dict[tuple[Arm, float], Consumption] = {}  # each stands in several comparisons

    def of(self, arm: Arm) -> pd.DataFrame:
        """Returns the steps of one arm's runs."""
        return self.table[(self.table.baseline == arm[0]) & (self.table.group_size == arm[1])]

    def consumption(self, arm: Arm, target: float) -> Consumption:
        """Returns the own tokens of one arm's runs until a target accuracy."""
        if (arm, target) not in self.consumptions:
            self.consumptions[arm, target] = consumption(self.of(arm), target)
        return self.consumptions[arm, target]

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
        return float(evaluated.groupby("run").evaluation_accuracy.first().mean())

    def lacking(self, *arms: Arm) -> str:
        """Returns what keeps a comparison of these arms from a verdict, "" where nothing does."""
        short = [
            f"{label(*arm)}: {len(self.finals.get(arm, {}))}" for arm in arms if len(self.finals.get(arm, {})) < SEEDS
        ]
        return f"fewer than {SEEDS} seeds ({', '.join(short)})" if short else ""


def named(arm: Arm) -> str:
    """Returns what an arm is called in the tables."""
    return label(*arm)


def gradient_noise(results: pd.DataFrame) -> list[Comparison]:
    """Compares the noise of the true gradient for C1: OTB relative to the rival, where it is largest, then everywhere.

    results: of one task, as study.moments.relative_noise returns it. The number of seeds is that of policies.
    """
    task = str(results.task.iloc[0])
    judged = results[(results.estimator == OURS) & results.group_size.isin(judged_sizes(results))]
    effects = noise_effects(judged)
    place = int(np.argmax([effect.estimate for effect in effects]))
    worst = judged.iloc[place]
    lacking = [f"{stage}: nothing" for stage in STAGES if stage not in set(results.stage)]
    if (policies := int(results.policies.min())) < POLICIES:
        lacking.append(f"{policies} of {POLICIES} policies")
    verdict = UNDECIDED if lacking else noise_verdict(effects)
    lacking += [] if lacking else ["by the rules' first form, which asked for ten seeds: undecided"]
    what = f"{label(OURS)} relative to {label(RIVAL)} where it is noisiest: {worst.stage}, N={worst.group_size}"
    comparisons = [Comparison("C1", task, what, effects[place], verdict, "; ".join(lacking))]
    others: Any = results[results.estimator != RIVAL].sort_values(["group_size", "estimator"])
    for row, effect in zip(others.itertuples(), noise_effects(others), strict=True):
        name, size = str(row.estimator), int(row.group_size)
        what = f"{row.stage}: {label(name, size)} relative to {label(RIVAL, size)}"
        comparisons.append(Comparison("C1", task, what, effect, "", ""))
    return comparisons


def judged_sizes(results: pd.DataFrame) -> tuple[int, int]:
    """Returns the small N and the large one, or the largest that was measured."""
    return SMALL, min(LARGE, int(results.group_size.max()))


def noise_effects(results: pd.DataFrame, statistic: str = "relative_noise") -> list[Interval]:
    """Returns a statistic of every row with its interval: the noise relative to the rival's, or another one.

    Its number of seeds is that of policies.
    """
    names = [statistic, f"{statistic}_low", f"{statistic}_high", "policies"]
    return [Interval(*row) for row in results[names].itertuples(index=False)]


def noise_verdict(effects: list[Interval]) -> str:
    """Returns the verdict on C1 from OTB's relative noise at every stage, at the small and at the large N."""
    if any(effect.low > LESS_NOISE for effect in effects):
        return NOT_SUPPORTED
    lower = all(effect.high < 1 and effect.estimate <= LESS_NOISE for effect in effects)
    return SUPPORTED if lower else UNDECIDED


def accuracy_at_small_n(runs: Runs) -> list[Comparison]:
    """Compares final accuracies for C3: OTB at N = 4 with the rival at N = 32, then the control, then other arms."""
    theirs = (RIVAL, LARGE)
    ours, control = (OURS, SMALL), (RIVAL, SMALL)
    comparisons = []
    verdict, why = UNDECIDED, runs.lacking(ours, theirs)
    effect = differing(runs, ours, theirs)
    if not why:
        verdict = decide(effect, {"supported_above": -MATCHES, "refuted_below": -MATCHES})[0]
        matched = differing(runs, control, theirs)
        if verdict == SUPPORTED and matched.low > -MATCHES:
            why = f"empty: {named(control)} matches {named(theirs)} as well, {matched}"
    why = "; ".join(filter(None, [why, improvement_text(runs, ours, theirs)]))
    comparisons.append(Comparison("C3", runs.task, f"{named(ours)} minus {named(theirs)}", effect, verdict, why))
    others = [arm for arm in runs.finals if arm not in (ours, theirs)]
    for arm in sorted(others, key=lambda arm: (arm[1], arm[0])):
        for reference in (theirs, control) if arm[1] == SMALL else (theirs,):
            if reference != arm and {reference, arm} <= runs.finals.keys():
                comparisons.append(beside_c3(runs, arm, reference))
    return [*comparisons, beside_c3(runs, ours, control)]


def beside_c3(runs: Runs, ours: Arm, theirs: Arm) -> Comparison:
    """Returns a comparison of final accuracies that speaks no verdict."""
    what = f"{named(ours)} minus {named(theirs)}"
    return Comparison("C3", runs.task, what, differing(runs, ours, theirs), "", improvement_text(runs, ours, theirs))


def differing(runs: Runs, ours: Arm, theirs: Arm) -> Interval:
    """Returns the difference of final accuracies, paired by seed."""
    if not {ours, theirs} <= runs.finals.keys():
        return NOTHING
    return difference(runs.finals[ours], runs.finals[theirs], resamples=RESAMPLES)


def improvement_text(runs: Runs, ours: Arm, theirs: Arm) -> str:
    """Returns the probability that a run of ours ends higher than one of theirs, in words."""
    if not {ours, theirs} <= runs.finals.keys():
        return ""
    return better_text(runs.finals[ours], runs.finals[theirs])


def better_text(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Returns the probability of improvement in words. ours, theirs: seed -> final accuracy."""
    better = improvement(list(ours.values()), list(theirs.values()), resamples=RESAMPLES)
    return f"probability of improvement {better}"


def tokens_saved(runs: Runs) -> list[Comparison]:
    """Compares tokens to a target for C4: OTB at N = 4 with the rival at both N, then other arms with both at N = 4."""
    ours, large, small = (OURS, SMALL), (RIVAL, LARGE), (RIVAL, SMALL)
    others = sorted(set(runs.finals) - {ours, large, small})  # each of them may be the best, and so set the target
    comparisons = []
    of_size = saved(runs, small, large, TARGETS[0] * runs.best_final)  # how much of the saving N alone makes
    for share in TARGETS:
        target = share * runs.best_final
        against = {arm: saved(runs, ours, arm, target) for arm in (large, small)}
        for arm, effect in against.items():
            censored = censored_text((runs, ours), (runs, arm), target)
            what = f"{named(ours)} against {named(arm)}, to {share:.0%} of the best ({named(runs.best)}: {target:.3f})"
            verdict, why = "", censored
            if share == TARGETS[0] and arm == large:
                verdict, lacks = UNDECIDED, runs.lacking(ours, large, small, *others) or little_learned(runs, target)
                if not lacks:
                    verdict, lacks = verdict_within_bounds(runs, ours, against, target)
                    hangs_on = f"against {named(small)}: {against[small]}; {named(small)} alone saves {of_size}"
                    censored = f"{hangs_on}; {censored}"
                why = "; ".join(filter(None, [lacks, censored]))
            comparisons.append(Comparison("C4", runs.task, what, effect, verdict, why))
    target = TARGETS[0] * runs.best_final
    if {ours, large} <= runs.finals.keys():
        what = f"{named(ours)} against {named(large)}, to {TARGETS[0]:.0%} of the best, by medians"
        medians = median_saving(runs.consumption(ours, target), runs.consumption(large, target), resamples=RESAMPLES)
        comparisons.append(Comparison("C4", runs.task, what, medians, "", ""))
    at_small = [arm for arm in others if arm[1] == SMALL]
    for arm, rival in [(small, large), *((arm, rival) for rival in (small, ours) for arm in at_small)]:
        if {arm, rival} <= runs.finals.keys():
            what = f"{named(arm)} against {named(rival)}, to {TARGETS[0]:.0%} of the best"
            censored = censored_text((runs, arm), (runs, rival), target)
            comparisons.append(Comparison("C4", runs.task, what, saved(runs, arm, rival, target), "", censored))
    return comparisons


def little_learned(runs: Runs, target: float) -> str:
    """Returns why tokens to a target say little, "" where it lies well above the start."""
    if target >= runs.start + LEARNED * (runs.best_final - runs.start):
        return ""
    return f"the start, {runs.start:.3f}, is too near to the target for tokens to it to say much"


def rollouts_divided(wide: Runs, deep: Runs) -> list[Comparison]:
    """Compares, beside C4, two ways to divide as many rollouts per step: final accuracy, and tokens to the target.

    wide: many prompts in groups of the small N. deep: few prompts in groups of the large N.
    """
    target = TARGETS[0] * max(wide.best_final, deep.best_final)
    comparisons = []
    for baseline in sorted(name for name, size in deep.finals if size == LARGE and (name, SMALL) in wide.finals):
        many, few = (baseline, SMALL), (baseline, LARGE)
        what = f"{label(baseline)}: final accuracy, N={SMALL} minus N={LARGE}"
        lacks = "" if min(len(wide.finals[many]), len(deep.finals[few])) >= SEEDS else f"fewer than {SEEDS} seeds"
        ends = difference(wide.finals[many], deep.finals[few], resamples=RESAMPLES)
        why = "; ".join(filter(None, [lacks, better_text(wide.finals[many], deep.finals[few])]))
        comparisons.append(Comparison(FIXED, wide.task, what, ends, "", why))
        what = f"{label(baseline)}: tokens saved to {target:.3f}, N={SMALL} against N={LARGE}"
        effect = saving(wide.consumption(many, target), deep.consumption(few, target), resamples=RESAMPLES)
        censored = censored_text((wide, many), (deep, few), target)
        comparisons.append(Comparison(FIXED, wide.task, what, effect, "", "; ".join(filter(None, [lacks, censored]))))
    return comparisons


def saving_verdict(against_large: Interval, against_small: Interval) -> str:
    """Returns the verdict on C4 from the savings against the rival at its large and at its small N."""
    if against_large.high < CLAIMED_SAVING or against_small.high < SMALLEST_SAVING:
        return NOT_SUPPORTED
    return SUPPORTED if against_large.low > 0 and against_small.low > 0 else UNDECIDED


def verdict_within_bounds(runs: Runs, ours: Arm, against: dict[Arm, Interval], target: float) -> tuple[str, str]:
    """Returns (verdict, why) of C4, where a saving that is a lower bound alone refutes nothing.

    against: the saving of ours against the rival at its large N, and then at its small one.
    """
    verdict, own = saving_verdict(*against.values()), runs.consumption(ours, target)
    bounded = [arm for arm in against if is_lower_bound(own, runs.consumption(arm, target))]
    open_above = against | {arm: against[arm]._replace(high=np.inf) for arm in bounded}
    if verdict == NOT_SUPPORTED != saving_verdict(*open_above.values()):
        return UNDECIDED, "a lower bound; by the rules' form before, which let one refute the claim: not supported"
    return verdict, ""


def saved(runs: Runs, ours: Arm, theirs: Arm, target: float) -> Interval:
    """Returns the share of their tokens to the target that ours saves."""
    if not {ours, theirs} <= runs.finals.keys():
        return NOTHING
    return saving(runs.consumption(ours, target), runs.consumption(theirs, target), resamples=RESAMPLES)


def censored_text(ours: tuple[Runs, Arm], theirs: tuple[Runs, Arm], target: float) -> str:
    """Returns how many runs of two arms never reached the target, and where that cuts their comparison off."""
    if lacking := [f"{named(arm)} was not run" for runs, arm in (ours, theirs) if arm not in runs.finals]:
        return ", ".join(lacking)
    reaching = {named(arm): runs.consumption(arm, target) for runs, arm in (ours, theirs)}
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
    bound = ": a lower bound" if measured and is_lower_bound(*reaching.values()) else ""
    return (", ".join(found) or "no run censored") + bound


def collapses(rows: pd.DataFrame) -> list[Comparison]:
    """Compares the shares of collapsed runs for C2, the rival minus OTB, then minus every other arm.

    rows: of one task. The number of seeds is the least of a setting.
    """
    judged, settings, seeds = judged_settings(rows)
    table = stability_table(steps_table(judged)) if len(judged) else pd.DataFrame(columns=["baseline", "collapsed"])
    counts = {str(arm): (int(part.collapsed.sum()), len(part)) for arm, part in table.groupby("baseline")}
    if not {OURS, RIVAL} <= counts.keys():
        what = f"{label(RIVAL)} minus {label(OURS)}"
        return [Comparison("C2", str(rows.task.iloc[0]), what, NOTHING, UNDECIDED, "no setting has both arms")]
    ends = judged.merge(table[["run", "collapsed"]], left_on="key", right_on="run").groupby(SETTING).collapsed
    mixed = f"in {int((ends.nunique() > 1).sum())} of them some runs collapse and others do not"
    comparisons = []
    for arm in [OURS, *sorted(set(counts) - {OURS, RIVAL})]:
        effect = share_difference(counts[RIVAL], counts[arm])._replace(seeds=seeds)
        what = " minus ".join(f"{label(name)} ({counts[name][0]} of {counts[name][1]})" for name in (RIVAL, arm))
        verdict, why = "", [f"{settings} of {CONDITIONS} settings, {mixed}"]
        if arm == OURS:
            verdict, reason = collapse_verdict(effect, counts[RIVAL])
            if seeds < SEEDS:
                verdict, reason = UNDECIDED, f"fewer than {SEEDS} seeds"
            why += [reason] if reason else []
            if settings < CONDITIONS and verdict != UNDECIDED:
                why.append("by the rules' first form, which named the whole grid: undecided")
        comparisons.append(Comparison("C2", str(rows.task.iloc[0]), what, effect, verdict, "; ".join(why)))
    return comparisons


def collapses_beside(rows: pd.DataFrame, words: str) -> Comparison:
    """Compares the shares of collapsed runs in settings that were added to C2's grid and speak no verdict of their own.

    rows: of one task. words: which settings these are.
    """
    found, left_out = collapses(rows)[0], rows.groupby(SETTING).ngroups - judged_settings(rows)[1]
    why = f"by the same rule: {found.verdict}"
    why += f"; settings left out for want of seeds: {left_out}" if left_out else ""
    return found._replace(what=f"{words}: {found.what}", verdict="", why=why)


def judged_settings(rows: pd.DataFrame) -> tuple[pd.DataFrame, int, int]:
    """Returns the rows of the settings of C2's grid that are judged, how many these are, and the least seeds of one.

    Judged are those with enough seeds of both arms for a verdict; where none has, those with as many of one as of the
    other. rows: of one task.
    """
    seeds = rows.groupby([*SETTING, "baseline"]).seed.nunique().unstack(fill_value=0)
    least = seeds.reindex(columns=[OURS, RIVAL], fill_value=0).min(axis=1)
    whole = least >= SEEDS
    if not whole.any():
        whole = (least > 0) & (least == seeds.max(axis=1))
    kept = rows[[bool(whole[key]) for key in zip(rows.learning_rate, rows.varied, strict=True)]]
    return kept, int(whole.sum()), int(least[whole].min()) if whole.any() else 0


def collapse_verdict(effect: Interval, rival: tuple[int, int]) -> tuple[str, str]:
    """Returns (verdict, why) of C2. rival: (runs that collapsed, all runs)."""
    if rival[0] < SMALLEST_COLLAPSE * rival[1]:
        return UNDECIDED, "too few of the rival's runs collapsed: nothing was put to the test"
    if effect.low > 0 and effect.estimate >= SMALLEST_COLLAPSE:
        return SUPPORTED, ""
    return (NOT_SUPPORTED, "") if effect.high < SMALLEST_COLLAPSE else (UNDECIDED, "")


def cost(results: Path) -> list[Comparison]:
    """Compares the time of score norms, baseline and advantages with that of the loss for C5.

    results: of benchmarks/bench.py; nothing is compared where it is missing. The number of seeds is that of steps.
    """
    if not results.exists():
        return []
    found = pd.read_csv(results).set_index("name")
    row: Any = found.loc[OVERHEAD]
    effect = Interval(row["value"], row["low"], row["high"], int(row["pairs"]))
    verdict = SUPPORTED if effect.high < MOST_OF_LOSS else NOT_SUPPORTED if effect.low > MOST_OF_LOSS else UNDECIDED
    lean: Any = found.loc[LEAN_STEP]
    lean_step = Interval(lean["value"], lean["low"], lean["high"], int(lean["pairs"]))
    return [
        Comparison("C5", "arithmetic", OVERHEAD, effect, verdict, ""),
        Comparison("C5", "arithmetic", "a lean step with OTB / one with RLOO", lean_step, "", ""),
    ]
