"""Tests the forecast of noise from rewards and score norms: known numbers, exact cases, invariances, intervals.

The command: tests/laboratory/test_forecast_command.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from experiments.forecast import checked_estimators
from otb.advantages import advantages
from otb.baselines import is_unbiased
from otb.baselines.none import none
from otb.baselines.otb import otb
from otb.baselines.otb_loo import otb_loo
from otb.baselines.rloo import rloo
from otb.baselines.sequence_energy import sequence_energy
from otb.baselines.sequence_energy_loo import sequence_energy_loo
from otb.laboratory.energies import best_function, energy_contrast, headroom, variance
from otb.laboratory.forecast import ScoredRollouts, forecast, prompt_terms
from otb.rollouts import RolloutGroups
from tests.support.recipes import composed
from tests.support.toy_policy import ToyPolicy

SOME = {"rloo": rloo, "none": none, "sequence_energy": sequence_energy, "sequence_energy_loo": sequence_energy_loo}


def prompt_of(rewards, norms) -> ScoredRollouts:
    """A prompt from a list of score norms per rollout."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(w, dtype=torch.float32) for w in norms], batch_first=True)
    return ScoredRollouts(torch.tensor(rewards), torch.tensor([len(w) for w in norms]), padded)


def random_prompts(count: int, seed: int = 0, rollouts: int = 16, tokens: int = 12) -> list[ScoredRollouts]:
    """Prompts of random lengths whose wrong rollouts spend about three times the energy of right ones."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        rewards = (torch.rand(rollouts, generator=generator) < 0.5).float()
        lengths = torch.randint(1, tokens + 1, (rollouts,), generator=generator)
        w = torch.rand(rollouts, tokens, generator=generator) * (3 - 2 * rewards).unsqueeze(1)
        prompts.append(ScoredRollouts(rewards, lengths, w * (torch.arange(tokens) < lengths.unsqueeze(1))))
    return prompts


# ---- known numbers


def test_forecast_of_four_rollouts_is_the_one_computed_by_hand():
    """Two right rollouts of energy 1, two wrong ones of energy 3, one group of 4, so there is one partition.

    rloo: A = 1 - 1/3 and 0 - 2/3; energy (2 x 1 x 4/9 + 2 x 3 x 4/9) / 4 = 8/9; slope 4 x (2/3 x 1/2) / 4 = 1/3.
    none: A = 1 and 0; energy 2/4 = 1/2; unbiased, so c = 1; 1/2 / (8/9) = 9/16.
    sequence_energy: B = 2/8, A = 3/4 and -1/4; energy (2 x 9/16 + 6 x 1/16) / 4 = 3/8; slope (3/4 + 1/4) x 1/4 = 1/4,
    c = 3/4; 3/8 / (9/16) / (8/9) = 3/4.
    sequence_energy_loo: B = 1/7 and 2/5, A = 6/7 and -2/5; energy (2 x 36/49 + 6 x 4/25) / 4; c = 1.
    Of the gain of sequence_energy, 1/4, what its leave-one-out form loses is self-inclusion.
    """
    prompt = prompt_of([1.0, 1.0, 0.0, 0.0], [[1.0], [0.5, 0.5], [3.0], [1.0, 1.0, 1.0]])
    table = forecast([prompt], SOME, [4], count=3, resamples=0).set_index("estimator")
    without = (2 * 36 / 49 + 6 * 4 / 25) / 4 / (8 / 9)
    assert table.forecast.to_dict() == pytest.approx(
        {"rloo": 1, "none": 9 / 16, "sequence_energy": 3 / 4, "sequence_energy_loo": without}
    )
    assert table.scale.to_dict() == pytest.approx({"rloo": 1, "none": 1, "sequence_energy": 3 / 4} | {ONE_LOO: 1})
    assert table.self_inclusion.sequence_energy == pytest.approx((without - 3 / 4) / (1 / 4))
    assert table.self_inclusion.drop("sequence_energy").isna().all()


ONE_LOO = "sequence_energy_loo"


def test_sums_over_prompts_weigh_a_prompt_by_its_energy():
    """The second prompt, whose rewards are equal, adds nothing to rloo and 4 x 5 / 4 = 5 to none: 5.5 / (8/9)."""
    first = prompt_of([1.0, 1.0, 0.0, 0.0], [[1.0], [1.0], [3.0], [3.0]])
    second = prompt_of([1.0] * 4, [[5.0]] * 4)
    table = forecast([first, second], {"rloo": rloo, "none": none}, [4], resamples=0).set_index("estimator")
    assert table.forecast.none == pytest.approx(5.5 / (8 / 9))


# ---- exact cases


@pytest.mark.parametrize(
    "baseline", [rloo, none, otb, otb_loo, sequence_energy], ids=lambda baseline: baseline.__name__
)
def test_energy_is_the_exact_second_moment_where_scores_are_orthogonal_and_their_norm_is_w(baseline):
    """A row of logits per prefix: s_t of one rollout share no parameter, and ||s_t||^2 = w_t. Every group of 2."""
    policy = ToyPolicy()
    members, probability = policy.every_group(2)
    found = [
        prompt_terms(
            ScoredRollouts(policy.rewards[m], policy.lengths[m], policy.score_norms[m]), {"x": baseline}, 2, 1, 0
        )
        for m in members
    ]
    rollouts = policy.groups(members)
    advantage = advantages(rollouts, baseline(rollouts)).expand(*members.shape, policy.scores.shape[1])
    gradients = torch.einsum("pgt,pgtd->pgd", advantage, policy.scores[members])
    exact = probability @ gradients.square().sum(-1).mean(1)
    energies = torch.tensor([terms["x"][0] for terms in found], dtype=torch.float64)
    assert float(probability @ energies) == pytest.approx(float(exact), rel=1e-9)


def coins(right: int, wrong: int, rollouts: int) -> ScoredRollouts:
    """Fair coins with w = 1/2 each: the first is the reward, the others say nothing; right and wrong lengths differ."""
    rewards = torch.arange(rollouts).remainder(2).float()
    lengths = torch.where(rewards > 0, right, wrong)
    return ScoredRollouts(rewards, lengths, 0.5 * (torch.arange(max(right, wrong)) < lengths.unsqueeze(1)))


def exact_noise(baseline, right: int, wrong: int, size: int) -> float:
    """Noise of the group gradient on coins, over every pattern of rewards.

    A coin's score is +-(1/2, -1/2). Given the rewards, scores of all but the first coin are independent with mean 0, so
    a rollout adds A_t^2 / 2 for each. The first coin's sum has mean and variance over the patterns. c is the mean
    of A_1 (2 R - 1), relative to that of R itself, 1/2; mu = (1/2) (1/2, -1/2), ||mu||^2 = 1/8.
    """
    rewards = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)))
    lengths = torch.where(rewards > 0, right, wrong)
    w = 0.5 * (torch.arange(max(right, wrong)) < lengths.unsqueeze(-1))
    rollouts = RolloutGroups(rewards, lengths, w)
    advantage = advantages(rollouts, baseline(rollouts)).expand(w.shape)
    first = (advantage[..., 0] * (2 * rewards - 1)).mean(1)  # of each pattern
    others = (advantage[..., 1:].square() * w[..., 1:]).sum((1, 2)).mean() / size**2
    variance_of_first = first.var(correction=0) / 2  # ||(1/2, -1/2)||^2
    return float((variance_of_first + others) / ((first.mean() / 0.5) ** 2 / 8))


@pytest.mark.parametrize("name", ["none", "sequence_energy", "sequence_energy_loo", "otb_loo"])
def test_forecast_is_the_exact_noise_where_the_signal_is_small_beside_it(name):
    """100 coins where right, 300 where wrong: one of them carries signal, which the forecast takes for noise."""
    estimators = SOME | {"otb_loo": otb_loo}
    table = forecast([coins(100, 300, 1024)], estimators, [4], count=16, resamples=0).set_index("estimator")
    exact = exact_noise(estimators[name], 100, 300, 4) / exact_noise(rloo, 100, 300, 4)
    assert table.forecast[name] == pytest.approx(exact, rel=0.02)
    assert abs(exact - 1) > 0.15  # otherwise any forecast would do


def test_scale_is_exact_where_the_advantage_is_one_number_per_rollout():
    """E[A_1 (2 R - 1)] over every pattern of four coins, relative to 1/2 for rloo and every unbiased estimator."""
    table = forecast([coins(1, 3, 4096)], SOME, [4], count=16, resamples=0).set_index("estimator")
    rewards = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)))
    lengths = torch.where(rewards > 0, 1, 3)
    rollouts = RolloutGroups(rewards, lengths, 0.5 * (torch.arange(3) < lengths.unsqueeze(-1)))
    advantage = advantages(rollouts, sequence_energy(rollouts))[..., 0]
    exact = float((advantage * (2 * rewards - 1)).mean()) / 0.5
    assert table.scale.sequence_energy == pytest.approx(exact, rel=0.02) and exact < 0.85


# ---- all shipped estimators


@pytest.fixture(scope="module")
def shipped():
    return checked_estimators(composed(command="forecast"))


def test_all_shipped_estimators_without_hidden_states_exact_norms_or_memory_are_forecast(shipped):
    assert {"none", "group_mean", "grpo", "rloo", "otb", "otb_loo", "otb_carry", "otb_carry_loo", "opo"} < set(shipped)
    assert not {"energy_probe", "value", "otb_exact", "ob_exact", "trajectory_cv"} & set(shipped)
    table = forecast(random_prompts(6), shipped, [2, 4], count=4, resamples=50)
    assert len(table) == 2 * len(shipped) and table[["forecast", "forecast_low", "forecast_high"]].notna().all().all()


def test_unbiased_estimators_have_scale_one_and_the_group_mean_has_its_own(shipped):
    table = forecast(random_prompts(6), shipped, [4], count=4, resamples=0).set_index("estimator")
    assert all(table.scale[name] == 1 for name, baseline in shipped.items() if is_unbiased(baseline))
    assert table.scale.group_mean == pytest.approx(3 / 4)  # (N - 1) / N of rloo's
    assert table.forecast.group_mean == pytest.approx(1)


def test_forecast_is_the_same_in_any_order_of_rollouts_and_prompts(shipped):
    """With one group of all rollouts there is one partition, so order is all that changes."""
    prompts = random_prompts(5, rollouts=8)
    turned = [ScoredRollouts(p.rewards.flip(0), p.lengths.flip(0), p.score_norms.flip(0)) for p in prompts[::-1]]
    tables = [forecast(some, shipped, [8], count=2, resamples=0) for some in (prompts, turned)]
    np.testing.assert_allclose(tables[0].forecast, tables[1].forecast, rtol=1e-4)
    np.testing.assert_allclose(tables[0].scale, tables[1].scale, rtol=1e-4)


def test_padding_and_chunks_of_partitions_change_nothing(shipped, monkeypatch):
    prompts = random_prompts(3)
    wide = [ScoredRollouts(p.rewards, p.lengths, torch.nn.functional.pad(p.score_norms, (0, 5))) for p in prompts]
    before = forecast(prompts, shipped, [4], count=6, resamples=0)
    monkeypatch.setattr("otb.laboratory.forecast.NUMBERS_AT_ONCE", 1)
    after = forecast(wide, shipped, [4], count=6, resamples=0)
    np.testing.assert_allclose(before.forecast, after.forecast, rtol=1e-5)


def test_prompts_with_fewer_rollouts_than_a_group_are_left_out_at_that_size():
    prompts = [*random_prompts(3, rollouts=8), *random_prompts(2, seed=1, rollouts=4)]
    table = forecast(prompts, SOME, [4, 8, 16], count=2, resamples=0)
    assert table.groupby("group_size").prompts.first().to_dict() == {4: 5, 8: 3}


def test_nothing_is_forecast_where_rloo_has_no_energy():
    table = forecast([prompt_of([1.0] * 4, [[1.0]] * 4)] * 3, SOME, [2], count=2, resamples=20)
    assert table.forecast.isna().all() and table.forecast_low.isna().all()


def test_unscored_rollouts_are_refused():
    with pytest.raises(ValueError, match="Unscored rollouts .* Leave them out"):
        prompt_of([1.0, math.nan], [[1.0], [1.0]])


# ---- intervals


def test_interval_over_prompts_covers_the_truth():
    """80 samples of 24 prompts of two kinds, equally likely: right rollouts spend 1 or 3, wrong ones 2.

    At N = 2 rloo has E[W (R - R')^2] = (W_right + W_wrong) / 4: 3/4 and 5/4. none has W_right / 2: 1/2 and 3/2. The
    mean over the kinds is 1 for both, and so is the true ratio.
    """
    generator, covered = torch.Generator().manual_seed(0), 0
    for _ in range(80):
        prompts = []
        for kind in torch.randint(0, 2, (24,), generator=generator).tolist():
            rewards = (torch.rand(32, generator=generator) < 0.5).float()
            w = torch.where(rewards > 0, 1.0 + 2 * kind, 2.0).unsqueeze(1)
            prompts.append(ScoredRollouts(rewards, torch.ones(32, dtype=torch.long), w))
        table = forecast(prompts, {"rloo": rloo, "none": none}, [2], count=4, resamples=300).set_index("estimator")
        covered += bool(table.forecast_low.none < 1 < table.forecast_high.none)
        assert table.forecast_low.rloo == table.forecast_high.rloo == 1  # paired
    assert covered / 80 > 0.85


# ---- energies


def test_best_function_is_the_weighted_mean_reward_of_each_part():
    """Energy of the four tokens 2, 2, 2, 2 and of two parts 4, 4; the first rollout is right."""
    w, rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 2.0, 2.0]]), torch.tensor([1.0, 0.0])
    assert best_function(w, rewards, 1).tolist() == [0.25] * 4
    assert best_function(w, rewards, 2).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert best_function(w, rewards, 4).tolist() == best_function(w, rewards, 32).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert variance(w, rewards, best_function(w, rewards, 2)) == pytest.approx((2 * 0.25 + 2 * 0.25) / 2)


def test_headroom_is_found_where_energies_cross_and_nowhere_else():
    """Right rollouts spend everything early and wrong ones late: a number for each token leaves nothing of V.

    Two pieces of equal energy leave some: their border moves with the share of right rollouts among those fitted on.
    """
    crossing = prompt_of([1.0, 0.0] * 16, [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]] * 16)
    room = headroom([crossing] * 4)
    assert room["number"] == pytest.approx(1, abs=0.05) and room["token"] == pytest.approx(0, abs=1e-6)
    assert room["pieces"] == 4
    assert room["token_gain"] == pytest.approx(1) and room["token_gain_most"] == pytest.approx(1)
    same = prompt_of([1.0, 0.0] * 16, [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]] * 16)
    room = headroom([same] * 4)
    assert room["token_gain"] == 0 and room["pieces"] == 1 and room["token_gain_most"] == pytest.approx(0, abs=1e-6)


def test_headroom_is_unknown_with_few_rollouts_or_equal_rewards():
    assert headroom(random_prompts(3, rollouts=8)) == {}
    assert headroom([prompt_of([1.0] * 16, [[1.0]] * 16)]) == {} == energy_contrast([prompt_of([1.0] * 2, [[1.0]] * 2)])


def test_energies_of_right_and_wrong_rollouts_are_compared_within_prompts():
    """Right: 1 + 0 + 0 + 0 + 1 in the fifths of five tokens; wrong: 4 and 2, of which ten tokens put two in a fifth."""
    prompts = [
        prompt_of([1.0, 0.0], [[1.0, 0.0, 0.0, 0.0, 1.0], [0.4] * 10]),
        prompt_of([1.0, 0.0], [[1.0, 0.0, 0.0, 0.0, 1.0], [0.2] * 10]),
        prompt_of([1.0, 1.0], [[9.0], [9.0]]),  # equal rewards: left out
    ]
    found = energy_contrast(prompts)
    assert found["prompts"] == 2 and found["above"] == pytest.approx(2) and found["below"] == pytest.approx(3)
    assert found["ratio"] == pytest.approx(2 / 3)
    assert found["ratio_low"] == pytest.approx(0.5) and found["ratio_high"] == pytest.approx(1)
    assert found["above_fifths"] == pytest.approx([1, 0, 0, 0, 1]) and found["below_fifths"] == pytest.approx([0.6] * 5)
    assert found["with_length"] == pytest.approx(1)  # the second prompt's energies are equal, and have no correlation
