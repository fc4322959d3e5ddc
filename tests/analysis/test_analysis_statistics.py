"""Statistics with known answers on tiny tables, and the coverage of the intervals on simulated data."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from analysis.curves import on_one_grid
from analysis.intervals import (
    Interval,
    bootstrap,
    curve_interval,
    difference,
    improvement,
    iqm,
    paired,
    probability_of_improvement,
    share_difference,
    two_arms,
    wilson,
)
from analysis.stability import collapse_step, drawdown, surges, trailing_mean
from analysis.token_consumption import (
    Consumption,
    horizon,
    is_lower_bound,
    log_rank,
    median_saving,
    median_tokens,
    restricted_mean,
    saving,
    tokens_to_target,
)


def arm(*runs) -> Consumption:
    """(tokens, reached) per run; the seeds are 0, 1, ..."""
    tokens, reached = zip(*runs, strict=True)
    return Consumption(np.arange(len(runs)), np.array(tokens, float), np.array(reached, bool))


# ---- intervals


def test_iqm_cuts_a_quarter_at_each_end():
    assert iqm([100.0, 2.0, 3.0, -50.0]) == 2.5  # of 4 values one goes at each end
    assert iqm([1, 2, 6]) == 3.0  # below 4 it is the mean
    values = np.random.default_rng(0).normal(size=(13, 3))
    assert iqm(values) == pytest.approx(np.sort(values, axis=0)[3:10].mean(axis=0))
    assert iqm(values.T, axis=1) == pytest.approx(iqm(values))
    assert iqm(values) == pytest.approx(stats.trim_mean(values, 0.25))
    values[5, 1] = np.nan  # is not cut off as if it were the largest
    assert np.isnan(iqm(values)).tolist() == [False, True, False]


def test_probability_of_improvement_counts_pairs_and_half_of_ties():
    # pairs (1,1) tie, (1,0) win, (0,1) loss, (0,0) tie: (0.5 + 1 + 0 + 0.5) / 4
    assert probability_of_improvement([1, 0], [1, 0]) == 0.5
    assert probability_of_improvement([3, 2], [1, 2]) == (1 + 1 + 1 + 0.5) / 4
    assert probability_of_improvement([2, 2], [2, 2, 2]) == 0.5
    columns = probability_of_improvement(np.array([[1, 3], [0, 2]]), np.array([[1, 1], [0, 2]]))
    assert columns.tolist() == [0.5, 0.875]  # the seeds are axis 0; every other axis is kept


def test_an_improvement_in_every_pair_is_not_certain():
    found = improvement([3, 4, 5], [0, 1, 2])
    assert found.estimate == found.high == 1 and found.low == pytest.approx(3 / (3 + 1.96**2), abs=1e-3)
    apart = improvement([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert apart.low < apart.estimate == 8 / 25 < apart.high  # 6 wins and 4 ties of 25 pairs


def test_the_bootstrap_is_seeded_and_refuses_an_empty_stratum():
    values = [np.random.default_rng(0).normal(size=12)]
    assert bootstrap(values, iqm, seed=3) == bootstrap(values, iqm, seed=3) != bootstrap(values, iqm, seed=4)
    with pytest.raises(ValueError, match="no seed"):
        bootstrap([[]], iqm)


def test_a_statistic_that_mixes_the_resamples_is_refused():
    with pytest.raises(ValueError, match="Reduce axis 0 alone"):
        bootstrap([[1.0, 2.0, 3.0]], np.mean)


def test_all_resamples_at_once_are_what_a_loop_over_them_gives():
    values, rng = np.random.default_rng(3).normal(size=7), np.random.default_rng(5)
    drawn = [iqm(values[rng.integers(0, 7, 7)]) for _ in range(400)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    factor = stats.t.ppf(0.975, 6) / stats.norm.ppf(0.975) * np.sqrt(7 / 6)
    estimate = iqm(values)
    expected = Interval(estimate, estimate + factor * (low - estimate), estimate + factor * (high - estimate), 7)
    assert bootstrap([values], iqm, resamples=400, seed=5) == pytest.approx(expected)


def test_the_interval_of_a_mean_is_near_students():
    values = np.random.default_rng(1).normal(size=30)
    found = bootstrap([values], partial(np.mean, axis=0), resamples=4000)
    low, high = stats.t.interval(0.95, 29, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05)


def test_fewer_than_three_seeds_give_no_interval():
    found = bootstrap([[0.2, 0.4]], iqm)
    assert found.estimate == pytest.approx(0.3) and np.isnan(found.low) and found.seeds == 2
    assert np.isnan(curve_interval(np.ones((2, 5)))[1:]).all()


def test_strata_are_resampled_by_themselves():
    # each stratum is constant, so no resample changes the sum
    found = bootstrap([[1.0] * 3, [5.0] * 4], lambda a, b: a.mean(0) + b.mean(0))
    assert tuple(found[:3]) == (6.0, 6.0, 6.0) and found.seeds == 3


def test_arms_that_share_seeds_are_paired():
    # the difference is 0.1 for every seed, however much the seeds differ: paired, nothing is left to vary
    theirs = {0: 0.1, 1: 0.5, 2: 0.9}
    ours = {seed: value + 0.1 for seed, value in theirs.items()}
    found = difference(ours, theirs)
    assert found[:3] == pytest.approx((0.1, 0.1, 0.1))
    others = {seed + 10: value for seed, value in ours.items()}
    assert not paired(others, theirs)[1]
    assert difference(others, theirs).low < -0.5
    assert paired(ours | {7: 0.3}, theirs)[0][0].shape == (3, 2)  # a seed that only one arm has leaves the pairs


def test_two_arms_stay_in_bounds():
    found = two_arms({0: 1, 1: 2, 2: 3}, {0: 0, 1: 0, 2: 0}, probability_of_improvement, bounds=(0, 1))
    assert tuple(found[:3]) == (1, 1, 1)


def test_shares_have_intervals_even_where_every_seed_agrees():
    low, high = wilson(0, 5)  # 0 and z^2 / (n + z^2) = 3.84 / 8.84
    assert low == 0 and high == pytest.approx(0.4345, abs=1e-3)
    # Newcombe (1998), table II: 56/70 - 48/80 has the interval [0.0524, 0.3339]
    assert share_difference((56, 70), (48, 80))[1:3] == pytest.approx((0.0524, 0.3339), abs=1e-4)


DRAWS = {
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "accuracies": (lambda rng, n: rng.beta(30, 20, size=n), None),
}


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("kind", DRAWS)
def test_intervals_cover_the_truth_about_95_per_cent_of_the_time(kind, seeds):
    draw, truth = DRAWS[kind]
    rng = np.random.default_rng(seeds)
    if truth is None:  # what the interquartile mean of so many seeds is on average
        truth = iqm(draw(rng, (seeds, 100_000))).mean()
    hits = [
        found.low <= truth <= found.high
        for found in (bootstrap([draw(rng, seeds)], iqm, resamples=250, seed=i) for i in range(200))
    ]
    assert 0.91 <= np.mean(hits) <= 0.99


def test_paired_and_unpaired_differences_cover_the_truth():
    rng, hits = np.random.default_rng(0), {"paired": [], "unpaired": []}
    for i in range(200):
        shared = rng.normal(size=5)
        ours, theirs = 0.3 + shared + rng.normal(size=5), shared + rng.normal(size=5)
        for kind, shift in (("paired", 0), ("unpaired", 10)):
            both = dict(enumerate(ours)), {seed + shift: value for seed, value in enumerate(theirs)}
            found = difference(*both, resamples=300, seed=i)
            hits[kind].append(found.low <= 0.3 <= found.high)
    assert all(0.91 <= np.mean(values) <= 1 for values in hits.values())


def test_a_curve_interval_equals_the_bootstrap_of_each_point():
    values = np.random.default_rng(0).normal(size=(6, 250))
    estimate, low, high = curve_interval(values, resamples=2000)
    point = bootstrap([values[:, 240]], iqm, resamples=2000)
    assert (estimate[240], low[240], high[240]) == pytest.approx(point[:3], abs=0.15)


# ---- curves


def test_curves_over_steps_keep_shared_steps_and_a_diverged_run_keeps_its_last_value():
    steps = np.array([0.0, 10.0, 20.0])
    runs = [(steps, steps / 10), (np.array([0.0, 5.0, 10.0, 20.0]), np.ones(4)), (steps[:2], np.array([0.0, 7.0]))]
    grid, values = on_one_grid(runs, [False, False, True], shared_steps=True)
    assert list(grid) == [0, 10, 20]
    assert values.tolist() == [[0, 1, 2], [1, 1, 1], [0, 7, 7]]


def test_curves_over_tokens_are_read_off_between_a_runs_own_points():
    runs = [(np.array([0.0, 100.0]), np.array([0.0, 1.0])), (np.array([0.0, 50.0, 80.0]), np.array([0.0, 1.0, 1.0]))]
    grid, values = on_one_grid(runs, [False, False], shared_steps=False)
    assert list(grid) == [0, 50, 80]  # up to what both runs consumed
    assert values.tolist() == [[0, 0.5, 0.8], [0, 1, 1]]


# ---- tokens to target


def evaluations(*points) -> dict[str, np.ndarray]:
    tokens, accuracies = np.array(points, float).T
    columns = {"evaluation_own_tokens_total": tokens, "evaluation_accuracy": accuracies}
    return columns | {"own_tokens_total": tokens}


def test_tokens_to_target_are_linear_between_evaluations():
    run = evaluations((0, 0.4), (100, 0.6), (200, 0.5), (300, 0.9))
    assert tokens_to_target("r", run, 0.5) == (50.0, True)  # the first crossing, half way from 0.4 to 0.6
    assert tokens_to_target("r", run, 0.8) == (275.0, True)
    assert tokens_to_target("r", run, 0.4) == (0.0, True)
    assert tokens_to_target("r", run, 0.95) == (300.0, False)  # censored at what it consumed


def test_restricted_mean_by_hand():
    tokens, reached = np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, False])
    # Kaplan-Meier: at 1 there are 4 at risk, 3/4 left; at 3 there are 2 at risk, 3/4 * 1/2
    assert restricted_mean(tokens, reached, 4.0) == pytest.approx(1 + 2 * 0.75 + 1 * 0.375)
    assert restricted_mean(tokens, np.ones(4, bool), 10.0) == pytest.approx(2.5)  # uncensored: the mean


def test_restricted_mean_is_the_area_under_the_curve_of_scipy():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (6, 50)).astype(float)  # with many ties
    reached = rng.random((6, 50)) < 0.6
    for limit in (3.0, 5.5, 20.0):
        edges = np.append(np.arange(0, limit), limit)  # the curve drops at whole numbers alone
        for column, area in enumerate(restricted_mean(tokens, reached, limit)):
            data = stats.CensoredData.right_censored(tokens[:, column], ~reached[:, column])
            assert area == pytest.approx((stats.ecdf(data).sf.evaluate(edges[:-1]) * np.diff(edges)).sum())


def test_a_run_that_never_arrives_is_not_dropped():
    ours, theirs = arm((10, True), (10, True), (10, True)), arm((10, True), (30, False), (30, False))
    # dropped, the rival's mean would be 10 and the saving 0; censored, it is (10 + 30 + 30) / 3 up to the horizon 30
    assert horizon(ours, theirs) == 30
    assert saving(ours, theirs).estimate == pytest.approx(1 - 10 / (70 / 3))
    assert median_tokens(ours) == 10 and np.isnan(median_tokens(theirs))


def test_the_horizon_is_where_both_arms_are_still_observed():
    short, long = arm((10, False), (10, False), (5, True)), arm((40, True), (50, True), (60, False))
    assert horizon(short, long) == 10  # what the long arm does past 10 is compared with nothing
    assert horizon(arm((5, True)), arm((9, True))) == 9  # none censored: plain means
    assert saving(short, long).estimate > 0


def test_a_saving_that_is_cut_off_before_the_rival_arrives_is_a_lower_bound_and_medians_are_not():
    ours = arm((10, True), (12, True), (14, False), (13, True))
    theirs = arm((60, True), (30, True), (40, True), (50, True))
    assert horizon(ours, theirs) == 14 and is_lower_bound(ours, theirs)
    assert saving(ours, theirs).estimate < 0.2
    assert median_saving(ours, theirs).estimate == pytest.approx(1 - 12 / 40)
    assert not is_lower_bound(arm((10, True), (20, True)), theirs)  # all of ours arrive: nothing is cut off
    mostly = arm((10, True), (9, False), (9, False), (9, False))
    assert np.isnan(median_saving(mostly, theirs).estimate)
    assert is_lower_bound(ours, arm((60, False), (30, False)))


def test_savings_are_paired_over_seeds_and_undefined_where_nobody_arrives():
    ours, theirs = arm((10, True), (20, True), (40, True)), arm((20, True), (40, True), (80, True))
    found = saving(ours, theirs)
    assert found[:3] == pytest.approx((0.5, 0.5, 0.5))  # every pair saves one half: nothing varies
    nobody = arm((10, False), (10, False), (10, False))
    assert np.isnan(saving(nobody, nobody).estimate) and np.isnan(log_rank(nobody, nobody))


def test_the_log_rank_test_tells_separated_arms_apart():
    early, late = (arm(*((float(t), True) for t in range(start, start + 8))) for start in (1, 20))
    assert log_rank(early, late) < 0.001 < log_rank(early, early)


# ---- stability


def test_trailing_mean_has_no_look_ahead():
    assert trailing_mean(np.arange(1.0, 13.0))[[0, 1, 11]].tolist() == [1.0, 1.5, 7.5]  # (3 + ... + 12) / 10


def test_a_collapse_lasts_to_the_end():
    flat = np.full(30, 0.8)
    assert collapse_step(flat) is None
    # the mean of ten is 0.8 (10 - k) / 10 + 0.02 k / 10 after k bad steps: below 0.4 from k = 6 on
    assert collapse_step(np.concatenate([flat, np.full(20, 0.02)])) == 30 + 5
    assert collapse_step(np.concatenate([flat, np.full(8, 0.02), flat])) is None  # it came back
    assert collapse_step(np.full(5, 0.8), diverged=True) == 4
    assert collapse_step(np.zeros(20)) is None  # it never had anything to lose


def test_surges_and_drawdown_by_hand():
    norms = np.full(20, 0.1)
    norms[[5, 15]] = 0.6
    assert np.flatnonzero(surges(norms)).tolist() == [15]  # step 5 has no ten steps before it
    assert drawdown(np.array([0.2, 0.6, 0.1]))[-1] == pytest.approx(0.4 - 0.3)  # means .2, .4, .3
