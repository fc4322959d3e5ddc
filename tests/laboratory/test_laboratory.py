"""Tests that the laboratory's statistics are unbiased on an enumerable policy and right on literals.

Its score vectors: tests/laboratory/test_laboratory_scores.py. The command: tests/laboratory/test_variance_command.py.
"""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from otb.advantages import advantages
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.otb_exact import otb_exact
from otb.baselines.otb_loo import otb_loo
from otb.baselines.rloo import rloo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.baselines.value import Value
from otb.laboratory.estimators import Prompt, fitted, rollout_advantages, rollout_gradients, step_groups
from otb.laboratory.moments import moments, partitions, truth
from otb.laboratory.oracle import oracle
from otb.laboratory.proxy import correlations, proxy_quality, proxy_table, top_share
from otb.laboratory.scores import Measured, Rollout
from otb.laboratory.statistics import estimator_statistics
from otb.laboratory.workers import energies, prompt_moments
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from otb.tasks.arithmetic import Arithmetic
from tests.support.toy_policy import LONGEST, RESPONSES, ToyPolicy

POLICY = ToyPolicy()
PROBE = EnergyProbe(pseudo_rollouts=1.0)


def measured(drawn, policy=POLICY) -> Measured:
    """Returns the laboratory's measurements of these responses (M,); a score has 21 numbers and needs no sketch."""

    def tokens(values):
        return values[drawn][policy.own[drawn]].numpy()

    names = ("log_probs", "log_sum_sq_probs", "hidden_states", "prefix_norms")
    return Measured(
        rewards=policy.rewards[drawn].numpy(),
        lengths=policy.lengths[drawn].numpy(),
        token_norms=tokens(policy.score_norms),
        sketches=tokens(policy.scores),
        **{name: tokens(getattr(policy, name)) for name in names},
    )


def prompt_of(drawn) -> Prompt:
    return Prompt(measured(drawn))


# ---- moments


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("baseline", [rloo, otb], ids=["rloo", "otb"])
def test_moments_are_unbiased_for_the_exact_ones(baseline, size):
    """Over 1,500 draws of seven rollouts, each average is within four standard errors of the enumerated value."""
    expected, power = POLICY.expected(baseline, size)
    exact = {"power": power, "signal": expected @ expected, "overlap": expected @ POLICY.gradient}
    exact["truth"] = POLICY.gradient @ POLICY.gradient
    plain = torch.einsum("i,itd->id", POLICY.rewards, POLICY.scores)  # mean mu, independent between rollouts
    generator, found = torch.Generator().manual_seed(0), []
    for drawn in POLICY.draw(1500, 7, seed=1):
        members = partitions(7, size, 2, generator)
        prompt = prompt_of(drawn)
        gradients = rollout_gradients(prompt, rollout_advantages(baseline, prompt, members))
        found.append(moments(gradients.double(), plain[drawn], members))
    found = pd.DataFrame(found)
    error = found.std() / len(found) ** 0.5
    for name, value in exact.items():
        assert abs(found[name].mean() - float(value)) < 4 * error[name], name
    plug_in = (power - float(exact["signal"])) / (7 // size)  # what ||mean of g||^2 would add to the signal
    assert plug_in > 8 * error["signal"] and error["power"] < 0.02 * power


def test_moments_on_literals():
    """Two partitions split three rollouts into groups of one: g is the rollout's gradient, one number."""
    members = torch.tensor([[[0], [1], [2]], [[2], [0], [1]]])
    gradients = torch.tensor([[[1.0], [2.0], [3.0]], [[1.0], [2.0], [6.0]]])
    reference = torch.tensor([[2.0], [4.0], [0.0]])
    found = moments(gradients, reference, members)
    # power: (1 + 4 + 9) / 3 and (1 + 4 + 36) / 3. signal: products of different groups, (2 + 3 + 6) / 3 and
    # (2 + 6 + 12) / 3. overlap: the others' mean reference is 2, 1, 3: (2 + 2 + 9) / 3 and (2 + 2 + 18) / 3.
    # truth: (2 x 4 + 2 x 0 + 4 x 0) / 3
    expected = {"power": 55 / 6, "signal": 31 / 6, "overlap": 35 / 6, "truth": 8 / 3}
    assert found == pytest.approx(expected, rel=1e-6)
    assert truth(reference) == pytest.approx(8 / 3)


def test_partitions_are_disjoint_and_random_and_refuse_fewer_than_two_groups():
    drawn = partitions(11, 3, 40, torch.Generator().manual_seed(0))
    assert drawn.shape == (40, 3, 3)
    assert all(len(set(row)) == 9 and set(row) <= set(range(11)) for row in drawn.flatten(1).tolist())
    assert len({tuple(row) for row in drawn.flatten(1).tolist()}) == 40
    assert set(drawn.flatten().tolist()) == set(range(11))  # nobody is always left out
    with pytest.raises(ValueError, match="11 rollouts make fewer than two groups of 6. Try samples=12"):
        partitions(11, 6, 1, torch.Generator())


# ---- statistics of estimators

TABLE = pd.DataFrame(
    [
        # power, signal, overlap, truth
        ("rloo", 0, 3.0, 1.0, 1.0, 1.0),
        ("rloo", 1, 5.0, 1.0, 1.0, 1.0),
        ("twin", 0, 3.0, 1.0, 1.0, 1.0),
        ("twin", 1, 5.0, 1.0, 1.0, 1.0),
        ("half", 0, 1.0, 0.25, 0.5, 1.0),
        ("half", 1, 2.0, 0.35, 0.5, 1.0),
        ("energy_probe", 0, 2.0, 1.0, 1.0, 1.0),
        ("energy_probe", 1, 2.0, 1.0, 1.0, 1.0),
    ],
    columns=["estimator", "prompt", "power", "signal", "overlap", "truth"],
).assign(group_size=4)


def judged(table):
    return estimator_statistics(table).set_index("estimator")


def test_judgement_on_a_literal_table():
    found = judged(TABLE)
    # rloo: sums 8, 2, 2, 2: scale 2 / 2, variance (8 - 2) / 2 prompts, noise 6 / (1 x 2), cosine 2 / sqrt(8 x 2)
    # half: sums 3, 0.6, 1, 2: scale 1 / 2, variance 2.4 / 2, noise 2.4 / (0.25 x 2), bias (0.6 - 2 + 2) / 2,
    #       direction 1 - 1 / (0.6 x 2), cosine 1 / sqrt(3 x 2)
    # energy_probe: sums 4, 2, 2, 2: noise 2 / 2
    columns = ["variance", "noise", "scale", "bias", "direction_bias", "cosine", "relative_noise", "over_probe"]
    expected = {
        "rloo": [3.0, 3.0, 1.0, 0.0, 0.0, 0.5, 1.0, 3.0],
        "half": [1.2, 4.8, 0.5, 0.3, 1 / 6, 6**-0.5, 1.6, 4.8],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found.loc[name, columns].to_numpy(float), values, atol=1e-12)
    assert (found.prompts == 2).all() and (found.group_size == 4).all()
    # two prompts resample to (2, 0), (1, 1) and (0, 2). half over rloo is there (1.5 / 0.5) / (4 / 2) = 1.5, 1.6, and
    # (3.3 / 0.5) / (8 / 2) = 1.65: the interval of the ratio is narrower than the interval of either noise
    assert found.loc["half", ["relative_noise_low", "relative_noise_high"]].tolist() == pytest.approx([1.5, 1.65])
    assert found.loc["rloo", ["noise_low", "noise_high"]].tolist() == pytest.approx([2.0, 4.0])


def test_ratio_of_two_estimators_with_the_same_moments_is_1_in_every_resample():
    twin = judged(TABLE).loc["twin"]
    assert (twin.relative_noise, twin.relative_noise_low, twin.relative_noise_high) == (1.0, 1.0, 1.0)
    noisy = TABLE.assign(power=TABLE.power + TABLE.prompt)  # whatever the prompts are
    twin = judged(noisy).loc["twin"]
    assert (twin.relative_noise, twin.relative_noise_low, twin.relative_noise_high) == (1.0, 1.0, 1.0)


def test_energy_ratio_is_over_prompts_with_an_oracle_and_divided_by_the_squared_scale():
    table = TABLE.assign(energy=np.where(TABLE.prompt == 0, 0.5, np.nan), oracle_energy=0.4)
    found = judged(table).energy_ratio
    assert found["rloo"] == pytest.approx(0.5 / 0.4) and found["half"] == pytest.approx(0.5 / 0.25 / 0.4)
    assert "energy_ratio" not in judged(TABLE)


def test_a_signal_that_is_lost_in_the_noise_gives_no_number_and_no_interval():
    """The unbiased estimate of ||mu||^2 may be negative; noise relative to it would then be negative too."""
    lost = judged(TABLE.assign(truth=-0.1)).loc["half"]
    assert lost[["noise", "scale", "bias", "direction_bias", "cosine", "relative_noise"]].isna().all()
    # with 1 and -0.1 a quarter of the resamples has a negative sum: there is a value and no interval
    some = judged(TABLE.assign(truth=np.where(TABLE.prompt == 0, 1.0, -0.1))).loc["half"]
    assert some.noise > 0 and np.isnan(some.noise_low) and np.isnan(some.noise_high)
    assert some[["variance", "variance_low", "variance_high"]].notna().all()


def test_without_resamples_there_are_the_same_values_and_no_intervals():
    whole, alone = estimator_statistics(TABLE), estimator_statistics(TABLE, resamples=0)
    assert list(alone) == [column for column in whole if not column.endswith(("_low", "_high"))]
    pd.testing.assert_frame_equal(alone, whole[list(alone)])


# ---- from baselines to gradients

LEARNED = (PROBE, TrajectoryCV(pseudo_rollouts=1.0), Value(learning_rate=0.1))
MEMBERS = torch.tensor([[[0, 1, 2], [5, 4, 3]], [[6, 2, 4], [1, 5, 0]]])  # of seven rollouts, one is left out
DRAWN = POLICY.draw(1, 7, seed=3)[0]


@pytest.mark.parametrize(
    "baseline",
    [rloo, otb, otb_loo, ob_exact, otb_exact, partial(otb, tail="carry"), *(POLICY.taught(b, 3) for b in LEARNED)],
    ids=lambda baseline: getattr(baseline, "__name__", type(baseline).__name__),
)
def test_advantages_in_partitions_are_those_of_each_group_alone(baseline):
    found = rollout_advantages(baseline, prompt_of(DRAWN), MEMBERS).expand(-1, -1, LONGEST)
    for k, left_out in ((0, 6), (1, 3)):
        assert found[k, left_out].eq(0).all()
        for group in MEMBERS[k]:
            rollouts = POLICY.seen(baseline, DRAWN[group].unsqueeze(0))
            expected = advantages(rollouts, baseline(rollouts))[0].expand(-1, LONGEST)
            own = POLICY.own[DRAWN[group]]
            torch.testing.assert_close(found[k, group][own].double(), expected[own], rtol=1e-5, atol=1e-5)


def test_rollout_gradient_is_the_sum_of_advantages_times_scores():
    prompt = prompt_of(DRAWN)
    advantage = rollout_advantages(otb, prompt, MEMBERS)
    expected = torch.einsum("kmt,mtd->kmd", advantage.double(), POLICY.scores[DRAWN])
    torch.testing.assert_close(rollout_gradients(prompt, advantage).double(), expected, rtol=1e-5, atol=1e-6)
    one_per_rollout = rollout_advantages(rloo, prompt, MEMBERS)
    assert one_per_rollout.shape == (2, 7, 1)
    expected = torch.einsum("km,mtd->kmd", one_per_rollout.squeeze(-1).double(), POLICY.scores[DRAWN])
    torch.testing.assert_close(rollout_gradients(prompt, one_per_rollout).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("baseline", LEARNED, ids=lambda baseline: type(baseline).__name__)
def test_fitted_learns_step_by_step_like_the_trainer_and_leaves_its_argument_alone(baseline):
    """Five prompts make two steps of two, and the fifth is left over. Groups are the first three rollouts."""
    drawn = POLICY.draw(5, 4, seed=5)
    prompts = [prompt_of(each) for each in drawn]
    before = copy.deepcopy(baseline.state_dict())
    found = fitted(baseline, prompts, 3, 2)
    assert baseline.state_dict() == before == {}
    expected = copy.deepcopy(baseline)
    for start in (0, 2):
        expected.update(POLICY.seen(expected, drawn[start : start + 2, :3]))
    following = POLICY.draw(20, 3, seed=6)
    values = [each(POLICY.seen(each, following)) for each in (found, expected)]
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-4)
    assert fitted(rloo, prompts, 3, 2)(POLICY.groups(following)).shape == (20, 3, 1)  # which learns nothing


def test_groups_of_a_step_are_padded_to_the_longest_rollout():
    short, long = (torch.tensor([RESPONSES.index(response)] * 2) for response in ((0,), (1, 1, 1)))
    step = step_groups(PROBE, [prompt_of(short), prompt_of(long)], 2)
    assert step.score_norms.shape == (2, 2, 3) and step.lengths.tolist() == [[1, 1], [3, 3]]
    assert step.score_norms[0, :, 1:].eq(0).all() and step.own[1].all()
    assert step.reduced["values"].shape == (2, 2, 3)
    assert step.totals["moments"][-1, -1] == pytest.approx(float(step.score_norms.sum()), rel=1e-5)  # both prompts'


def test_prompt_keeps_prefix_norms_and_zeroes_the_rest_past_the_last_own_token():
    prompt = prompt_of(torch.tensor([RESPONSES.index((1, 0)), RESPONSES.index((2, 1, 1))]))
    assert prompt.own.tolist() == [[True, True, False], [True, True, True]]
    assert prompt.prefix_norms[0, 2] == prompt.prefix_norms[0, 1] > 0
    for values in (prompt.score_norms, prompt.log_probs, prompt.token_norms):
        assert values[0, 2] == 0
    torch.testing.assert_close(prompt.score_norms, prompt.token_norms)  # logits are the parameters


# ---- one prompt's moments


def test_judgement_of_a_prompt_has_a_row_per_estimator_and_size_and_the_same_groups_for_all(tmp_path):
    measured(POLICY.draw(1, 12, seed=8)[0]).save(tmp_path / "prompt.npz")
    estimators = {(name, size): rloo for name in ("one", "other") for size in (2, 3)}
    found = pd.DataFrame(prompt_moments(4, tmp_path / "prompt.npz", estimators, POLICY.taught(PROBE, 2), 3, None))
    assert sorted(zip(found.estimator, found.group_size, strict=True)) == sorted(estimators)
    assert (found.prompt == 4).all() and "energy" not in found
    first, second = (found[found.estimator == name].drop(columns="estimator").to_numpy() for name in ("one", "other"))
    np.testing.assert_array_equal(first, second)


def test_energies_are_those_of_the_oracles_rollouts_on_literals():
    # R = 1, 0; w = (1, 2), (3, -): oracle halves B' = 0.5, 0.25 and B'' = 0, 1 of the first, 0.5 and 1 of the second
    norms, rewards = torch.tensor([[1.0, 2.0], [3.0, 0.0], [9.0, 9.0]]), torch.tensor([1.0, 0.0, 1.0])
    oracles = torch.tensor([[[0.5, 0.25], [0.0, 1.0]], [[0.5, 0.0], [1.0, 0.0]]])
    # 1 x (1 - 0.5) x (1 - 0) + 2 x (1 - 0.25) x (1 - 1) = 0.5; 3 x (-0.5) x (-1) = 1.5; mean 1
    advantage = torch.tensor([[[1.0, 1.0], [2.0, 0.0], [7.0, 7.0]], [[0.0, 0.0], [1.0, 0.0], [7.0, 7.0]]])
    members = torch.tensor([[[0], [1]], [[1], [2]]])  # the first rollout is left out of the second partition
    # w A^2: 1 + 2 and 3 x 4; second partition 3 x 1: 18 over three rollouts that were drawn
    prompt = SimpleNamespace(rewards=rewards, score_norms=norms)
    assert energies(prompt, advantage, members, oracles) == {"energy": 6.0, "oracle_energy": 1.0}


# ---- the oracle


class Graded(Arithmetic):
    """A task that rewards a response according to its text."""

    def __init__(self, longest: int, grade):
        object.__setattr__(self, "max_completion_length", longest)
        object.__setattr__(self, "grade", grade)

    def reward(self, completions: list, **columns) -> list[float]:
        return [self.grade(messages[-1]["content"]) for messages in completions]


def test_oracle_of_a_constant_reward_is_that_reward_and_sees_the_rows_columns(untrained, tokenizer):
    seen = set()

    class Constant(Graded):
        def reward(self, completions, **columns):
            seen.update((name, len(values), values[0]) for name, values in columns.items())
            return [0.75] * len(completions)

    prompt = torch.arange(20, 26)
    rollout = Rollout(torch.cat([prompt, torch.tensor([31, 41, 51, 61])]), torch.arange(10) >= 6, 0.75)
    row = {"prompt": "not handed on", "answer": "7"}
    torch.manual_seed(0)
    found = oracle(untrained.eval(), tokenizer, Constant(6, None), row, rollout, 4, 1.0)
    torch.testing.assert_close(found, torch.full((2, 4), 0.75))
    assert seen == {("answer", 16, "7")}


class TwoTokens:
    """A model of one or two tokens: each is 3 with probability 0.25 and 4 with 0.75, whatever came before."""

    device = torch.device("cpu")
    LOGITS = torch.tensor([0, 0, 0, 0.25, 0.75, 0]).log()

    def generate(self, input_ids, max_new_tokens, **options):
        logits = [self.LOGITS.expand(len(input_ids), -1) for _ in range(max_new_tokens)]
        new = torch.stack([torch.multinomial(each.softmax(-1), 1).squeeze(-1) for each in logits], 1)
        return SimpleNamespace(sequences=torch.cat([input_ids, new], 1), logits=logits)


class Letters:
    pad_token_id, eos_token_id = 0, 1

    def batch_decode(self, texts, skip_special_tokens):
        assert skip_special_tokens
        return ["".join("..?ab?"[token] for token in text.tolist() if token > 1) for text in texts]


def test_oracle_is_the_surprise_weighted_value_of_the_prefix():
    """Two tokens are a with 1/4 or b with 3/4. R = 1 if both are a; w(a) = 2 (3/4)^2, w(b) = 2 (1/4)^2.

    Before the first: E[w R] = (1/4)(1/4) 2 (3/4)^2 and E[w] = 2 (1/4)(9/16) + 2 (3/4)(1/16) = 3/8: 3/16. After an a:
    (1/4) 2 (9/16) / (3/8) = 3/4. After a b: 0. The plain values would be 1/16, 1/4 and 0.
    """
    task = Graded(2, lambda text: float(text == "aa"))
    for first, expected in ((3, [3 / 16, 3 / 4]), (4, [3 / 16, 0.0])):
        rollout = Rollout(torch.tensor([5, 5, first, 3]), torch.tensor([False, False, True, True]), 1.0)
        torch.manual_seed(1)
        found = oracle(TwoTokens(), Letters(), task, {}, rollout, 8_000, 1.0)
        # of 4,000 continuations: standard error below 0.01 at the first token, 0.012 at the second
        torch.testing.assert_close(found, torch.tensor([expected] * 2), atol=0.05, rtol=0)
        assert not torch.equal(found[0], found[1])


def test_oracle_takes_the_temperature_into_the_weights():
    """At temperature 1/2 the logits double: a has (1/16) / (1/16 + 9/16) = 1/10 in w."""
    task = Graded(1, lambda text: float(text == "a"))
    rollout = Rollout(torch.tensor([5, 3]), torch.tensor([False, True]), 1.0)
    torch.manual_seed(1)
    found = oracle(TwoTokens(), Letters(), task, {}, rollout, 8_000, 0.5)
    # the stub still draws a with 1/4: (1/4) 2 (0.9)^2 / ((1/4) 2 (0.9)^2 + (3/4) 2 (0.1)^2) = 0.2025 / 0.21
    torch.testing.assert_close(found, torch.full((2, 1), 0.2025 / 0.21), atol=0.01, rtol=0)


# ---- the proxy


def test_top_share_is_that_of_the_largest_hundredth():
    energy = np.ones(200)
    energy[[7, 50]] = 101.0  # two of 200: 202 of 400
    assert top_share(energy) == pytest.approx(0.505)
    assert top_share(np.array([3.0, 1.0])) == 0.75  # at least one token


def test_correlations_on_literals():
    # ranks 1, 2, 3 against 1, 3, 2: 1 - 6 x 2 / (3 x 8) = 0.5. Deviations -1, 0, 1 and -2, 3, -1: 1 / sqrt(2 x 14)
    assert correlations([1.0, 2.0, 3.0], [1.0, 6.0, 2.0]) == pytest.approx((0.5, 1 / 28**0.5))
    assert np.isnan(correlations([1.0, 1.0], [1.0, 2.0])).all()


def test_proxy_is_perfect_where_logits_are_the_parameters_with_a_row_per_own_token():
    prompts = [prompt_of(drawn) for drawn in POLICY.draw(2, 30, seed=9)]
    table = proxy_table(prompts)
    assert len(table) == sum(int(prompt.lengths.sum()) for prompt in prompts)
    first = table[(table.prompt == 1) & (table.rollout == 3)]
    length = len(first)
    assert first.t.tolist() == list(range(length)) and length == prompts[1].lengths[3]
    np.testing.assert_allclose(first.prefix_proxy, first.proxy.cumsum(), rtol=1e-6)
    np.testing.assert_allclose(first.prefix_exact, prompts[1].prefix_norms[3, :length], rtol=1e-6)
    quality = proxy_quality(table).set_index("of")
    assert list(quality.index) == ["token", "prefix", "prefix, same prompt and t", "rollout"]
    # scores of different prefixes are orthogonal, so norms of prefixes are sums of norms of tokens
    np.testing.assert_allclose(quality[["spearman", "pearson"]], 1, atol=1e-4)
    assert quality.top_share_proxy["token"] == pytest.approx(quality.top_share_exact["token"], rel=1e-5)


def test_measured_proxy_is_that_of_the_score_norms():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    log_probs, log_sum_sq_probs = logits.log_softmax(-1)[:, 2], log_sum_squared_probs(logits)
    empty = np.zeros(0)
    kept = Measured(
        np.array([1.0, 0.0]), np.array([2, 1]), log_probs.numpy(), log_sum_sq_probs.numpy(), np.zeros((3, 2)),
        empty, empty, empty,
    )  # fmt: skip
    prompt = Prompt(kept)
    w = logit_gradient_proxy(log_probs, log_sum_sq_probs)
    torch.testing.assert_close(prompt.score_norms, torch.stack([w[:2], torch.tensor([w[2], 0.0])]))
    assert prompt.sketches is None and prompt.prefix_norms is None
