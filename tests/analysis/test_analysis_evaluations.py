"""Statistics of evaluations against enumeration: every subset, every tie-break, every resample."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis import evaluations
from analysis.evaluations import majority, measures, over_problems, pass_curve, peak_and_final, sampling_error
from otb.errors import RunError


def samples_of(*problems: list, ending="end", **columns) -> pd.DataFrame:
    """A frame as of read_samples; a problem is a list of (reward, vote), or of rewards."""
    rows = []
    for problem, drawn in enumerate(problems):
        for sample, what in enumerate(drawn):
            row = {"problem": problem, "sample": sample, "ending": ending, "own_tokens": 10 * problem + sample}
            reward, *vote = what if isinstance(what, tuple) else (what,)
            row |= {"reward": math.nan if reward is None else reward, **columns}
            rows.append(row | ({"vote": vote[0]} if vote else {}))
    return pd.DataFrame(rows)


def value(table: pd.DataFrame, measure: str, k: int | None = None) -> float:
    (row,) = table[(table.measure == measure) & ((table.k == k) | (k is None))].to_dict("records")
    return row["estimate"]


# ---- pass@k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_sets_of_samples_that_hold_a_right_one(n):
    right = np.arange(n + 1)
    curve = pass_curve(np.full(n + 1, n), right, n)
    for c, k in itertools.product(right, range(1, n + 1)):
        drawn = [1] * c + [0] * (n - c)
        sets = [any(chosen) for chosen in itertools.combinations(drawn, k)]
        assert curve[c, k - 1] == pytest.approx(np.mean(sets), abs=1e-12)


def test_pass_at_k_is_unknown_beyond_the_samples_there_are_and_survives_many():
    curve = pass_curve(np.array([2, 4]), np.array([1, 0]), 4)
    np.testing.assert_allclose(curve, [[0.5, 1.0, np.nan, np.nan], [0.0, 0.0, 0.0, 0.0]])
    # 1 - C(1000, 500) / C(1024, 500) of 1024 samples with 24 right ones, in logarithms
    miss = math.lgamma(1001) - math.lgamma(501) - (math.lgamma(1025) - math.lgamma(525))
    assert pass_curve(np.array([1024]), np.array([24]), 500)[0, -1] == pytest.approx(1 - math.exp(miss), rel=1e-9)


# ---- maj@k


def test_majority_is_the_mean_over_every_way_to_break_a_tie():
    for votes in itertools.product(["7", "8", "9", None], repeat=4):
        right = [float(vote == "7") for vote in votes]
        counts = {vote: votes.count(vote) for vote in set(votes) - {None}}
        leaders = [vote for vote in counts if counts[vote] == max(counts.values())]
        expected = sum(leader == "7" for leader in leaders) / len(leaders) if leaders else 0.0
        assert majority(votes, right) == pytest.approx(expected)


def test_majority_is_unknown_where_its_answer_could_not_be_scored():
    assert math.isnan(majority(["x", "x", "7"], [math.nan, math.nan, 1.0]))
    assert majority(["x", "7", "7"], [math.nan, 1.0, 1.0]) == 1.0


# ---- intervals


def test_interval_of_few_problems_is_that_of_every_resample():
    values = np.array([0.0, 0.25, 0.75, 1.0])
    means = [np.mean(chosen) for chosen in itertools.product(values, repeat=4)]
    low, high = np.quantile(means, [0.025, 0.975])
    stretched = 3.182446 / 1.959964 * math.sqrt(4 / 3)  # Student's t of 3 degrees of freedom, as analysis/intervals.py
    found = over_problems(values, share=False)
    assert found.estimate == 0.5 and found.seeds == 4
    assert found.high == pytest.approx(0.5 + (high - 0.5) * stretched, abs=0.07)
    assert found.low == max(0.0, 0.5 - (0.5 - low) * stretched) == 0.0
    assert over_problems(values).high == 1.0  # a share


def test_interval_where_all_problems_agree_claims_no_certainty():
    solved = over_problems(np.ones(30))
    assert solved.estimate == solved.high == 1.0 and solved.low == pytest.approx(0.886, abs=0.001)  # Wilson
    assert over_problems(np.array([0.5, np.nan, 0.7])).seeds == 2
    assert math.isnan(over_problems(np.array([0.5, 0.7])).low)  # too few problems
    assert math.isnan(over_problems(np.array([np.nan])).estimate)


def test_sampling_error_squared_is_unbiased():
    """Over all outcomes of n samples that are right with probability p, its square has the mean p (1 - p) / n."""
    n, p = 5, 0.3
    outcomes = [(c, math.comb(n, c) * p**c * (1 - p) ** (n - c)) for c in range(n + 1)]
    expected = sum(chance * sampling_error([n], [c]) ** 2 for c, chance in outcomes)
    assert expected == pytest.approx(p * (1 - p) / n)
    # of a mean over two problems: half the root of the sum of squares
    assert sampling_error([4, 4], [2, 1]) == pytest.approx(math.sqrt(0.25 / 3 + 0.1875 / 3) / 2)
    assert math.isnan(sampling_error([1, 4], [1, 1]))


# ---- the tidy table


def test_measures_of_a_few_samples_are_those_counted_by_hand():
    frame = samples_of(
        [(1.0, "7"), (0.0, "8"), (1.0, "7"), (0.0, None)],
        [(0.0, "8"), (0.0, "8"), (1.0, "5"), (None, "9")],
        [(0.0, None), (0.0, None), (0.0, None), (0.0, None)],
    )
    frame.loc[[2, 9], "ending"] = "length"  # a right answer of the first problem, a wrong one of the third
    table = measures(frame, 4)
    assert value(table, "avg_at_k") == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)
    assert value(table, "maj_at_k") == pytest.approx((1 + 0 + 0) / 3)
    assert value(table, "unscored") == pytest.approx(1 / 12)
    assert value(table, "truncated") == pytest.approx(2 / 12) and value(table, "ended") == pytest.approx(10 / 12)
    assert value(table, "right_and_ended") == pytest.approx((1 / 4 + 1 / 3 + 0) / 3)
    assert value(table, "right_not_ended") == pytest.approx((1 / 4 + 0 + 0) / 3)
    assert value(table, "no_answer") == pytest.approx((1 + 0 + 4) / 12)
    assert value(table, "own_tokens") == pytest.approx(11.5)
    # pass@1 is avg@k; pass@2: 1 - C(2,2)/C(4,2), 1 - C(2,2)/C(3,2), 0; pass@4: the second has but three scored samples
    assert value(table, "pass_at_k", 1) == pytest.approx(value(table, "avg_at_k"))
    assert value(table, "pass_at_k", 2) == pytest.approx((5 / 6 + 2 / 3 + 0) / 3)
    rows = {row.k: row for row in table[table.measure == "pass_at_k"].itertuples()}
    assert rows[4].estimate == pytest.approx(1 / 2) and rows[4].problems == 2 and rows[3].problems == 3
    assert set(table.measure) <= set(evaluations.MEASURES)


def test_measures_that_a_task_does_not_have_are_absent():
    plain = measures(samples_of([1.0, 0.0], [0.0, 0.0], [1.0, 1.0]), 2)
    assert not {"maj_at_k", "no_answer", "tool_tokens", "cut_by_turns"} & set(plain.measure)
    tools = measures(samples_of([1.0], [0.0], [1.0], ending="turns", tool_tokens=3), 1)
    assert value(tools, "cut_by_turns") == 1.0 and value(tools, "tool_tokens") == 3.0
    assert "avg_at_k_sampling_error" not in set(tools.measure)  # one sample tells nothing of its spread


def test_samples_of_reward_between_0_and_1_are_not_right():
    assert value(measures(samples_of([0.9, 1.0], [0.5, 0.5], [1.0, 1.0]), 2), "avg_at_k") == pytest.approx(0.5)


# ---- peak and final


def test_peak_is_the_highest_checkpoint_and_the_held_out_one_is_measured_on_other_samples():
    right = {
        10: np.array([[1.0, 0.0], [1.0, 0.0]]),  # best on the first half, .0 on the second
        20: np.array([[0.0, 1.0], [1.0, 1.0]]),  # best on the second half, .5 on the first
        30: np.array([[0.0, 0.0], [0.0, 1.0]]),
    }
    assert peak_and_final(right) == {
        "peak": 0.75, "peak_step": 20, "final": 0.25, "final_step": 30, "peak_held_out": 0.25, "checkpoints": 3,
    }  # fmt: skip


def test_held_out_peak_of_equal_checkpoints_is_their_accuracy_where_the_peak_is_too_high():
    rng = np.random.default_rng(0)
    drawn = [
        peak_and_final({step: (rng.random((30, 8)) < 0.4).astype(float) for step in range(10)}) for _ in range(400)
    ]
    assert np.mean([found["final"] for found in drawn]) == pytest.approx(0.4, abs=0.005)
    assert np.mean([found["peak_held_out"] for found in drawn]) == pytest.approx(0.4, abs=0.005)
    assert np.mean([found["peak"] for found in drawn]) > 0.44


# ---- reading


def test_folders_are_read_back(tmp_path, capsys):
    folder = tmp_path / "arithmetic" / "tiny-0"
    folder.mkdir(parents=True)
    drawn = [
        {"problem": p, "sample": s, "reward": r, "ending": "end", "own_tokens": 5, "response": "text"}
        for p, rewards in enumerate([[1.0, None, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
        for s, r in enumerate(rewards)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    frame = evaluations.read_samples(folder, k=2)
    assert len(frame) == 6 and "response" not in frame and frame.reward.isna().sum() == 1
    assert "response" in evaluations.read_samples(folder, responses=True)
    np.testing.assert_array_equal(evaluations.right_answers(frame), [[1, np.nan], [0, 0], [1, 1]])

    table = measures(frame, 2)
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    results = {"task": "arithmetic", "policy": "tiny", "step": None, "k": 2, "drawn": 2, "measures": rows}
    (folder / "results.json").write_text(json.dumps(results))
    read = evaluations.read_results(tmp_path)
    assert list(read.columns[:3]) == ["task", "policy", "step"] and value(read, "avg_at_k") == pytest.approx(2 / 3)
    evaluations.main([str(tmp_path)])
    assert capsys.readouterr().out.startswith("task,policy,step,measure,k,estimate,low,high,problems,folder\n")
    for reader in (evaluations.read_samples, evaluations.read_results):
        with pytest.raises(RunError, match="experiments/evaluate.py"):
            reader(tmp_path / "nowhere")
