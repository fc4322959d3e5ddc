"""The rules of C1 to C5, and that the report and the study never give the same runs two verdicts."""

import pandas as pd
import pytest

from analysis.claims.rules import (
    LARGE,
    NOT_SUPPORTED,
    SEEDS,
    SMALL,
    SUPPORTED,
    UNDECIDED,
    decide_accuracy,
    decide_collapses,
    decide_cost,
    decide_noise,
    decide_saving,
    decide_saving_within_bounds,
    judged_sizes,
)
from analysis.intervals import Interval, share_difference
from analysis.report.claims import decisions
from study import collected, verdicts
from study.run import ROWS


def interval(estimate: float, low: float, high: float) -> Interval:
    return Interval(estimate, low, high, SEEDS)


LOWER, HIGHER, WIDE = interval(0.6, 0.5, 0.7), interval(1.1, 0.95, 1.3), interval(0.85, 0.7, 1.2)


@pytest.mark.parametrize(
    ("effects", "verdict"),
    [([LOWER] * 6, SUPPORTED), ([LOWER, HIGHER], NOT_SUPPORTED), ([LOWER, WIDE], UNDECIDED), ([], UNDECIDED)],
)
def test_c1_needs_less_noise_everywhere(effects, verdict):
    assert decide_noise(effects) == verdict


def test_c1_is_decided_at_the_small_n_and_the_largest_up_to_32():
    assert judged_sizes({2, 4, 8, 16, 32, 64}) == (SMALL, LARGE)
    assert judged_sizes({4, 16}) == (4, 16) and judged_sizes({4}) == judged_sizes(set()) == (4, 4)


@pytest.mark.parametrize(
    ("rival", "ours", "seeds", "verdict"),
    [
        ((1, 40), (0, 40), SEEDS, UNDECIDED),  # nothing was put to the test
        ((30, 40), (5, 40), SEEDS, SUPPORTED),
        ((30, 40), (5, 40), SEEDS - 1, UNDECIDED),
        ((30, 40), (32, 40), SEEDS, NOT_SUPPORTED),
    ],
)
def test_c2_is_put_to_the_test_by_a_rival_that_collapses(rival, ours, seeds, verdict):
    assert decide_collapses(share_difference(rival, ours), rival, seeds)[0] == verdict


def test_c3_is_empty_where_the_rival_matches_its_own_large_n_too():
    matches, worse = interval(0, -0.01, 0.01), interval(-0.1, -0.2, -0.05)
    assert decide_accuracy(matches, worse) == (SUPPORTED, False)
    assert decide_accuracy(matches, matches) == (SUPPORTED, True)
    assert decide_accuracy(worse, matches) == (NOT_SUPPORTED, False)
    assert decide_accuracy(interval(0, -0.05, 0.05), worse) == (UNDECIDED, False)


@pytest.mark.parametrize(
    ("large", "small", "verdict"),
    [
        ((0.6, 0.5, 0.7), (0.2, 0.1, 0.3), SUPPORTED),
        ((0.6, 0.5, 0.7), (0.05, -0.1, 0.2), UNDECIDED),
        ((0.6, 0.5, 0.7), (0.0, -0.1, 0.05), NOT_SUPPORTED),  # N alone saves it
        ((0.4, 0.3, 0.5), (0.2, 0.1, 0.3), NOT_SUPPORTED),  # less than is claimed
    ],
)
def test_c4_needs_the_claimed_saving_and_one_at_the_same_n(large, small, verdict):
    assert decide_saving(interval(*large), interval(*small)) == verdict


def test_c4_is_not_refuted_by_a_lower_bound():
    large, small = interval(0.2, 0.1, 0.3), interval(0.2, 0.1, 0.3)
    assert decide_saving_within_bounds(large, small, (True, False)) == (UNDECIDED, NOT_SUPPORTED)
    assert decide_saving_within_bounds(large, small, (False, False)) == (NOT_SUPPORTED, "")
    assert decide_saving_within_bounds(large, interval(0, -0.1, 0.05), (True, False)) == (NOT_SUPPORTED, "")


def test_c5_allows_half_of_the_time_of_the_loss():
    found = [decide_cost(interval(at, at - 0.02, at + 0.02)) for at in (0.3, 0.49, 0.7)]
    assert found == [SUPPORTED, UNDECIDED, NOT_SUPPORTED]


# ---- one verdict for the same runs


@pytest.mark.parametrize("task", ["", "_tools", "_long"])
def test_the_report_decides_c3_and_c4_of_the_study_as_the_study_does(task):
    parts = [collected.read(ROWS / f"claim_c3_c4{task}{end}.csv") for end in ("", "_32")]
    rows = pd.concat(parts).query("baseline in ['otb', 'rloo', 'grpo']")
    in_report = dict(zip(("C1", "C2", "C3", "C4", "C5"), decisions(collected.steps_table(rows), None), strict=True))
    runs = verdicts.runs_of(rows)
    for claim, ours in (("C3", verdicts.compare_final(runs)), ("C4", verdicts.compare_tokens(runs))):
        assert in_report[claim]._replace(task=ours.task) == ours


def test_the_report_decides_c2_of_the_study_as_the_study_does():
    rows = collected.read(ROWS / "claim_c2.csv")
    ours, *_ = verdicts.collapses(rows)
    in_report = decisions(collected.steps_table(rows), None)[1]
    assert (in_report.what, in_report.effect, in_report.verdict) == (ours.what, ours.effect, ours.verdict)


def test_the_report_decides_c1_of_the_same_noise_as_the_study_does():
    """Both hand their intervals to `decide_noise`: measured noise of runs, and of policies."""
    for effects in ([LOWER] * 2, [LOWER, HIGHER], [LOWER, WIDE]):
        judged = [("half", size, effect) for size, effect in zip((SMALL, LARGE), effects, strict=True)]
        rows = [
            {"task": "a", "stage": stage, "policies": verdicts.POLICIES, "estimator": "otb", "group_size": size}
            | {f"relative_noise{end}": value for end, value in zip(("", "_low", "_high"), effect, strict=False)}
            for _, size, effect in judged
            for stage in verdicts.STAGES
        ]
        assert verdicts.gradient_noise(pd.DataFrame(rows))[0].verdict == decide_noise(effects)
