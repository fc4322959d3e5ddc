"""Makes the comparisons of the study from its rows. analysis/claims has the rules and the comparisons that decide.

One function per claim. Each returns the comparison that decides the claim first, and after it those beside it, without
a verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import label
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
    best_text,
    better_text,
    censored_text,
    compare_collapses,
    compare_final,
    compare_tokens,
    differing,
    improvement_text,
    saved,
    target_of,
)
from analysis.intervals import Interval, difference
from analysis.stability import stability_table
from analysis.token_consumption import median_saving, saving
from study.collected import FIXED, steps_table

STAGES, POLICIES = RULES["C1"]["stages"], RULES["C1"]["policies"]
TARGETS = RULES["C4"]["targets"]
OVERHEAD = "score norms, baseline and advantages / loss of a plain step"  # C5: names of figures of benchmarks/bench.py
LEAN_STEP = "step: otb / rloo, N=4"
CONDITIONS = 30  # C2: rates x samplers x (one update, or 2 and 4 with and without clipping)
SETTING = ["learning_rate", "varied"]  # C2: columns that distinguish its settings
TEN_SEEDS_EVERYWHERE = "undecided, because it asked for ten seeds of every claim, and C1 has three policies"
WHOLE_GRID = f"undecided, because it asked for all {CONDITIONS} settings of the grid"


def runs_of(rows: pd.DataFrame) -> Runs:
    """Returns the runs of one task."""
    return Runs(steps_table(rows), str(rows.task.iloc[0]))


def gradient_noise(results: pd.DataFrame) -> list[Comparison]:
    """Compares the noise of the true gradient for C1: OTB relative to the rival, where it is largest, then everywhere.

    results: of one task, as study.moments.relative_noise returns it. The number of seeds is that of policies.
    """
    task = str(results.task.iloc[0])
    judged = results[(results.estimator == OURS) & results.group_size.isin(sizes_of(results))]
    effects = noise_effects(judged)
    place = int(np.argmax([effect.estimate for effect in effects]))
    worst = judged.iloc[place]
    lacking = [f"{stage}: nothing" for stage in STAGES if stage not in set(results.stage)]
    if (policies := int(results.policies.min())) < POLICIES:
        lacking.append(f"{policies} of {POLICIES} policies")
    verdict = UNDECIDED if lacking else decide_noise(effects)
    original = "" if lacking else TEN_SEEDS_EVERYWHERE
    what = f"{label(OURS)} relative to {label(RIVAL)} at its noisiest: {worst.stage}, N={worst.group_size}"
    comparisons = [Comparison("C1", task, what, effects[place], verdict, "; ".join(lacking), original)]
    others: Any = results[results.estimator != RIVAL].sort_values(["group_size", "estimator"])
    for row, effect in zip(others.itertuples(), noise_effects(others), strict=True):
        name, size = str(row.estimator), int(row.group_size)
        what = f"{row.stage}: {label(name, size)} relative to {label(RIVAL, size)}"
        comparisons.append(Comparison("C1", task, what, effect, "", ""))
    return comparisons


def sizes_of(results: pd.DataFrame) -> tuple[int, int]:
    """Returns the two N that decide C1."""
    return judged_sizes({int(size) for size in results.group_size})


def noise_effects(results: pd.DataFrame, statistic: str = "relative_noise") -> list[Interval]:
    """Returns a statistic of every row with its interval: the noise relative to the rival's, or another one.

    Its number of seeds is that of policies.
    """
    names = [statistic, f"{statistic}_low", f"{statistic}_high", "policies"]
    return [Interval(*row) for row in results[names].itertuples(index=False)]


def accuracy_at_small_n(runs: Runs) -> list[Comparison]:
    """Compares final accuracies for C3: the deciding comparison, then every other arm with the rival at both N."""
    comparisons = [compare_final(runs)]
    others = [arm for arm in runs.finals if arm not in (OURS_SMALL, RIVAL_LARGE)]
    for arm in sorted(others, key=lambda arm: (arm[1], arm[0])):
        for reference in (RIVAL_LARGE, RIVAL_SMALL) if arm[1] == SMALL else (RIVAL_LARGE,):
            if reference != arm and runs.has(reference):
                comparisons.append(beside_c3(runs, arm, reference))
    return [*comparisons, beside_c3(runs, OURS_SMALL, RIVAL_SMALL)]


def beside_c3(runs: Runs, ours: Arm, theirs: Arm) -> Comparison:
    """Returns a comparison of final accuracies that decides nothing."""
    what = f"{label(*ours)} minus {label(*theirs)}"
    return Comparison("C3", runs.task, what, differing(runs, ours, theirs), "", improvement_text(runs, ours, theirs))


def tokens_saved(runs: Runs) -> list[Comparison]:
    """Compares tokens to a target for C4: the deciding comparison, other targets, medians, then other arms at N = 4."""
    comparisons = [compare_tokens(runs)]
    others = sorted(set(runs.finals) - {OURS_SMALL, RIVAL_LARGE, RIVAL_SMALL})
    for share in TARGETS:
        for rival in (RIVAL_LARGE, RIVAL_SMALL):
            if (share, rival) != (TARGETS[0], RIVAL_LARGE):
                comparisons.append(beside_c4(runs, OURS_SMALL, rival, share, with_best=True))
    if runs.has(OURS_SMALL, RIVAL_LARGE):
        arms = (runs.consumption(arm, target_of(runs)) for arm in (OURS_SMALL, RIVAL_LARGE))
        what = f"{label(*OURS_SMALL)} against {label(*RIVAL_LARGE)}, to {TARGETS[0]:.0%} of the best, by medians"
        comparisons.append(Comparison("C4", runs.task, what, median_saving(*arms, resamples=RESAMPLES), "", ""))
    at_small = [arm for arm in others if arm[1] == SMALL]
    rivals = (RIVAL_SMALL, OURS_SMALL)
    for arm, rival in [(RIVAL_SMALL, RIVAL_LARGE), *((arm, rival) for rival in rivals for arm in at_small)]:
        if runs.has(arm, rival):
            comparisons.append(beside_c4(runs, arm, rival, TARGETS[0]))
    return comparisons


def beside_c4(runs: Runs, ours: Arm, theirs: Arm, share: float, with_best: bool = False) -> Comparison:
    """Returns a comparison of tokens to a share of the best accuracy that decides nothing."""
    target = target_of(runs, share)
    best = f" ({best_text(runs, target)})" if with_best else ""
    what = f"{label(*ours)} against {label(*theirs)}, to {share:.0%} of the best{best}"
    why = censored_text((runs, ours), (runs, theirs), target)
    return Comparison("C4", runs.task, what, saved(runs, ours, theirs, target), "", why)


def rollouts_divided(wide: Runs, deep: Runs) -> list[Comparison]:
    """Compares, beside C4, two ways to divide as many rollouts per step: final accuracy, and tokens to the target.

    wide: many prompts in groups of the small N. deep: few prompts in groups of the large N.
    """
    target = TARGETS[0] * max(wide.best_final, deep.best_final)
    comparisons = []
    for baseline in sorted(name for name, size in deep.finals if size == LARGE and wide.has((name, SMALL))):
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


def collapses(rows: pd.DataFrame) -> list[Comparison]:
    """Compares the shares of collapsed runs for C2, the rival minus OTB, then minus every other arm.

    rows: of one task. The number of seeds is the least of a setting.
    """
    task = str(rows.task.iloc[0])
    judged, settings, seeds = judged_settings(rows)
    table = stability_table(steps_table(judged)) if len(judged) else pd.DataFrame(columns=["baseline", "collapsed"])
    counts = {str(arm): (int(part.collapsed.sum()), len(part)) for arm, part in table.groupby("baseline")}
    if not {OURS, RIVAL} <= counts.keys():
        what = f"{label(RIVAL)} minus {label(OURS)}"
        return [Comparison("C2", task, what, NOTHING, UNDECIDED, "no setting has both arms")]
    ends = judged.merge(table[["run", "collapsed"]], left_on="key", right_on="run").groupby(SETTING).collapsed
    mixed = int((ends.nunique() > 1).sum())
    ran = f"{settings} of {CONDITIONS} settings were run, and in {mixed} of them some runs collapse and others do not"
    comparisons = []
    for arm in [OURS, *sorted(set(counts) - {OURS, RIVAL})]:
        found = compare_collapses(task, counts, arm, seeds)
        original = WHOLE_GRID if settings < CONDITIONS and found.verdict not in ("", UNDECIDED) else ""
        why = "; ".join(filter(None, [ran, found.why]))
        comparisons.append(found._replace(why=why, original=original))
    return comparisons


def collapses_beside(rows: pd.DataFrame, words: str) -> Comparison:
    """Compares the shares of collapsed runs in settings that were added to C2's grid and do not decide it.

    rows: of one task. words: which settings these are.
    """
    found, left_out = collapses(rows)[0], rows.groupby(SETTING).ngroups - judged_settings(rows)[1]
    why = f"under the same rule: {found.verdict}"
    why += f"; settings with too few seeds, left out: {left_out}" if left_out else ""
    return found._replace(what=f"{words}: {found.what}", verdict="", why=why, original="")


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


def cost(results: Path) -> list[Comparison]:
    """Compares the time of score norms, baseline and advantages with that of the loss for C5.

    results: of benchmarks/bench.py; nothing is compared without it. Its number of seeds is the number of steps.
    """
    if not results.exists():
        return []
    found = pd.read_csv(results).set_index("name")
    ratios: list[Any] = [found.loc[name] for name in (OVERHEAD, LEAN_STEP)]
    effect, lean = (Interval(row["value"], row["low"], row["high"], int(row["pairs"])) for row in ratios)
    return [
        Comparison("C5", "arithmetic", OVERHEAD, effect, decide_cost(effect), ""),
        Comparison("C5", "arithmetic", "a lean step with OTB / one with RLOO", lean, "", ""),
    ]
