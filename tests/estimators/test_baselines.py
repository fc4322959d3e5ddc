"""Every baseline on small literals, and the properties that all of them share."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from otb.advantages import advantages
from otb.baselines import Baseline, carries_state, declare, is_unbiased, min_group_size_of, name_of, needs_of
from otb.baselines.damped_probe import DampedProbe
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.group_mean import group_mean
from otb.baselines.grpo import grpo
from otb.baselines.none import none
from otb.baselines.ob_exact import ob_exact
from otb.baselines.opo import opo
from otb.baselines.otb import otb
from otb.baselines.otb_carry_loo import otb_carry_loo
from otb.baselines.otb_exact import otb_exact
from otb.baselines.otb_loo import otb_loo
from otb.baselines.rloo import rloo
from otb.baselines.sequence_energy import sequence_energy
from otb.baselines.sequence_energy_loo import sequence_energy_loo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.baselines.weighted_mean import sum_of_others
from otb.metrics import advantage_metrics, energy_metrics
from otb.rollouts import OwnTokens, RolloutGroups
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.support.baselines import configured_baselines
from tests.support.groups import learned, random_groups, seen_by, taken

NAN = float("nan")
PER_TOKEN = ("score_norms", "prefix_norms")
otb_own, otb_carry = partial(otb, tail="own"), partial(otb, tail="carry")
otb_exact_own, otb_loo_zero = partial(otb_exact, tail="own"), partial(otb_loo, tail="zero")
# otb has no baseline in a lone tail; learned baselines do not know single prompts
CENTRED = [group_mean, grpo, rloo, opo, sequence_energy, otb_own, otb_carry, ob_exact, otb_exact_own]
CENTRED += [otb_loo, otb_carry_loo, sequence_energy_loo, EnergyProbe(), DampedProbe(), TrajectoryCV()]


def every_baseline() -> dict:
    """Returns all of conf/baseline, other values of their arguments, and learned baselines again after three steps."""
    variants = {
        "otb_own": otb_own,
        "otb_exact_own": otb_exact_own,
        "otb_loo_zero": otb_loo_zero,
        "energy_probe_corrected": EnergyProbe(group_correction=True),
    }
    fresh = configured_baselines() | variants
    learners = {name: copy.deepcopy(baseline) for name, baseline in fresh.items() if carries_state(baseline)}
    return fresh | {f"{name}_learned": learned(baseline) for name, baseline in learners.items()}


ALL = every_baseline()
of_every_baseline = pytest.mark.parametrize("baseline", ALL.values(), ids=ALL)


def label(baseline):
    return "_".join([name_of(baseline), *getattr(baseline, "keywords", {}).values()])


def groups(rewards, lengths=None, norms=None) -> RolloutGroups:
    """Turns literals into RolloutGroups; norms are lists of different lengths, one per rollout."""
    rewards = torch.tensor(rewards)
    if norms is not None:
        lengths = [[len(rollout) for rollout in group] for group in norms]
        width = max(max(row) for row in lengths)
        norms = torch.tensor([[rollout + [0.0] * (width - len(rollout)) for rollout in group] for group in norms])
    return RolloutGroups(rewards, torch.tensor(lengths), norms)


def used(baseline, rollouts: RolloutGroups) -> torch.Tensor:
    """Returns the advantages (P, G, T), after the baseline has seen the hidden states if it needs them."""
    seen = seen_by(baseline, rollouts)
    result = advantages(seen, baseline(seen))
    return torch.where(seen.alive, result, 0.0)


def assert_baseline(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected), atol=1e-6, rtol=0)


# ---- each one on literals


def test_none_is_zero():
    assert_baseline(none(groups([[1.0, 0.0]], [[2, 3]])), [[[0.0]]])


def test_group_mean_is_the_mean_of_the_scored_rollouts():
    rollouts = groups([[1.0, 0.0, 0.5], [1.0, NAN, 0.0], [NAN, NAN, NAN]], [[1, 1, 1]] * 3)
    assert_baseline(group_mean(rollouts), [[[0.5]], [[0.5]], [[0.0]]])


def test_grpo_divides_by_the_sample_deviation_of_the_group():
    # rewards 1, 0, 0, 1: mean 0.5, squares 4 x 0.25 = 1, deviation sqrt(1 / 3)
    baseline = grpo(groups([[1.0, 0.0, 0.0, 1.0]], [[1] * 4]))
    assert_baseline(baseline.value, [[[0.5]]])
    assert_baseline(baseline.scale, [[[(1 / 3) ** 0.5 + 1e-4]]])


def test_rloo_is_the_mean_of_the_others():
    rollouts = groups([[1.0, 0.0, 0.5], [1.0, NAN, 0.0], [1.0, NAN, NAN]], [[1, 1, 1]] * 3)
    value = rloo(rollouts).squeeze(-1)
    assert_baseline(value[0], [0.25, 0.75, 0.5])
    assert_baseline(value[1, [0, 2]], [0.0, 1.0])
    assert_baseline(value[2, 0], 0.0)  # no others


def test_opo_weighs_rewards_by_length():
    # (3 x 1 + 1 x 0) / 4, then the unscored rollout of 9 tokens left out
    rollouts = groups([[1.0, 0.0, NAN], [1.0, 0.0, NAN]], [[3, 1, 9], [0, 0, 0]])
    assert_baseline(opo(rollouts), [[[0.75]], [[0.0]]])


def test_sequence_energy_weighs_rewards_by_the_whole_energy():
    # W_T: 0.5 + 1.5 = 2 and 0.5; (2 x 1 + 0.5 x 0) / 2.5
    rollouts = groups([[1.0, 0.0]], norms=[[[0.5, 1.5], [0.5]]])
    assert_baseline(sequence_energy(rollouts), [[[0.8]]])


def test_otb_weighs_rewards_by_the_energy_so_far_and_its_tails_differ_past_the_second_longest():
    # t=1: W = 1, 3 -> 1/4. t=2: W = 3, 4 -> 3/7. t=3: the first rollout is alone with W = 4.
    norms = [[[1.0, 2.0, 1.0], [3.0, 1.0]]]
    rollouts = groups([[1.0, 0.0]], norms=norms)
    assert_baseline(otb(rollouts), [[[0.25, 3 / 7, 0.0]]])
    assert_baseline(otb_own(rollouts), [[[0.25, 3 / 7, 1.0]]])
    assert_baseline(otb_carry(rollouts), [[[0.25, 3 / 7, 4 / (4 + 4)]]])


def test_otb_with_one_rollout_per_prompt_has_no_baseline():
    rollouts = groups([[1.0], [0.5]], norms=[[[1.0, 2.0]], [[1.0]]])
    for baseline in (otb, otb_own, otb_carry):
        assert_baseline(baseline(rollouts), [[[0.0, 0.0]], [[0.0, 0.0]]])


def test_otb_with_no_energy_at_the_first_tokens_stays_in_the_range_of_the_rewards():
    # w = 0 where the policy was certain; there the gradient is 0 too, so any finite value serves
    rollouts = groups([[1.0, 0.5]], norms=[[[0.0, 2.0], [0.0, 2.0]]])
    assert_baseline(otb(rollouts), [[[0.5, 0.75]]])


def test_otb_refuses_an_unknown_tail():
    with pytest.raises(ValueError, match="tail=last is not one of zero, own, carry"):
        otb(random_groups(), tail="last")


def test_otb_minimises_the_energy_weighted_squared_advantage():
    rollouts = random_groups()
    best = otb_own(rollouts)

    def loss(baseline):
        return (rollouts.energy * rollouts.alive * (rollouts.returns - baseline).square()).sum(1)  # (P, T)

    for shift in (-1e-2, 1e-2):
        reached = rollouts.alive.any(1)
        assert (loss(best + shift) > loss(best))[reached].all()


def test_otb_equals_the_group_mean_where_energies_and_lengths_are_equal():
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    norms = torch.rand(4, 1, 5, generator=torch.Generator().manual_seed(2)).expand(4, 8, 5)
    rollouts = RolloutGroups(rewards, torch.full((4, 8), 5), norms)
    torch.testing.assert_close(otb(rollouts), group_mean(rollouts).expand(4, 1, 5))


def test_importance_weights_enter_the_energy_before_the_sum():
    # rho = 2 at the first token of the first rollout: w 1 -> 4; t=2: W = 4 + 1 and 1 + 1
    rho = torch.tensor([[[2.0, 1.0], [1.0, 1.0]]])
    rollouts = RolloutGroups(torch.tensor([[1.0, 0.0]]), torch.tensor([[2, 2]]), torch.ones(1, 2, 2) * rho.square())
    assert_baseline(otb(rollouts), [[[4 / 5, 5 / 7]]])


# ---- what all of them share


@of_every_baseline
def test_baseline_is_broadcastable_and_reordering_a_group_reorders_the_result(baseline):
    rollouts, order = random_groups(), torch.tensor([3, 0, 5, 1, 4, 2])
    expected = used(baseline, rollouts)[:, order]
    torch.testing.assert_close(used(baseline, taken(rollouts, order)), expected)


@pytest.mark.parametrize("baseline", CENTRED, ids=label)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0, -2.7])
def test_equal_rewards_give_zero_advantage_to_the_bit(baseline, reward):
    """A sum of 16 rewards of 0.7 is rounded; a rollout whose advantage is not exactly 0 would cost a backward."""
    rollouts = random_groups(group_size=16)
    rewards = torch.full_like(rollouts.rewards, reward)
    assert used(baseline, replace(rollouts, rewards=rewards)).eq(0).all()
    rewards[:, 2] = NAN
    assert used(baseline, replace(rollouts, rewards=rewards)).eq(0).all()


def test_means_of_rewards_of_0_and_1_are_those_of_the_plain_formulas_to_the_bit():
    """Counting from the smallest reward changes nothing if it is 0, and neither does clipping to the others' range."""
    rollouts = random_groups(prompts=200, group_size=7)
    chance = torch.linspace(0, 1, 200).unsqueeze(1)  # from groups that are all wrong to groups that are all right
    rewards = (rollouts.rewards < chance).float()
    rewards[:, 3] = NAN
    rollouts = replace(rollouts, rewards=rewards)
    zeroed, count = rewards.nan_to_num(), 6
    others = count - rollouts.scored.int()
    mean = rewards.nanmean(1, keepdim=True)
    std = ((rewards - mean).square().nansum(1, keepdim=True) / (count - 1)).sqrt()
    weights = rollouts.energy.where(rollouts.scored.unsqueeze(-1), 0.0)

    assert torch.equal(rloo(rollouts), ((zeroed.sum(1, keepdim=True) - zeroed) / others).unsqueeze(-1))
    assert torch.equal(group_mean(rollouts), mean.unsqueeze(-1))
    assert torch.equal(grpo(rollouts).value, mean.unsqueeze(-1))
    assert torch.equal(grpo(rollouts).scale, (std + 1e-4).unsqueeze(-1))
    lengths = rollouts.lengths * rollouts.scored
    by_length = (lengths * zeroed).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    assert torch.equal(opo(rollouts), by_length.unsqueeze(-1))
    weighed = sum_of_others(weights * zeroed.unsqueeze(-1)) / sum_of_others(weights)
    assert torch.equal(otb_carry_loo(rollouts), weighed)


def test_equal_rewards_leave_otb_an_advantage_in_the_lone_tail_only():
    rollouts = random_groups()
    equal = RolloutGroups(torch.ones_like(rollouts.rewards), rollouts.lengths, rollouts.score_norms)
    result = advantages(equal, otb(equal))
    assert result[~equal.lone.expand_as(result)].eq(0).all()
    assert result[equal.lone & equal.own].eq(1).all()


@of_every_baseline
def test_unscored_rollout_leaves_the_others_as_if_it_were_not_there_and_has_no_advantage(baseline):
    rollouts = random_groups()
    rewards = rollouts.rewards.clone()
    rewards[:, 2] = NAN
    with_unscored, keep = replace(rollouts, rewards=rewards), torch.tensor([0, 1, 3, 4, 5])
    result = used(baseline, with_unscored)
    assert result[:, 2].eq(0).all()
    torch.testing.assert_close(result[:, keep], used(baseline, taken(with_unscored, keep)))


@of_every_baseline
def test_rollout_without_own_tokens_and_an_unscored_group_give_finite_advantages(baseline):
    rollouts = random_groups()
    rewards, own_tokens = rollouts.rewards.clone(), torch.ones_like(rollouts.rewards)
    rewards[0], own_tokens[:, 1], own_tokens[1] = NAN, 0, 0
    per_token = {name: getattr(rollouts, name) * own_tokens.unsqueeze(-1) for name in PER_TOKEN}
    odd = replace(rollouts, rewards=rewards, lengths=rollouts.lengths * own_tokens.long(), **per_token)
    result = used(baseline, replace(odd, sequence_norms=rollouts.sequence_norms * own_tokens))
    assert result.isfinite().all()
    assert result[0].eq(0).all()


@of_every_baseline
def test_a_step_without_any_own_token_gives_advantages_and_metrics(baseline):
    """All rollouts of a step may be truncated and masked; T is then 0."""
    some = taken(random_groups(prompts=1), torch.tensor([0, 1]))
    nothing = {name: getattr(some, name)[..., :0] for name in PER_TOKEN}
    nothing["reduced"] = {name: values[:, :, :0] for name, values in some.reduced.items()}
    rollouts = replace(some, lengths=some.lengths * 0, sequence_norms=some.sequence_norms * 0, **nothing)
    rollouts = seen_by(baseline, rollouts)
    result = advantages(rollouts, baseline(rollouts))
    assert result.isfinite().all()
    assert energy_metrics(rollouts, result)["energy_mean"] == 0
    assert advantage_metrics(rollouts, baseline(rollouts), result) == {}


def test_energy_metrics_are_those_of_the_scored_rollouts():
    # the second rollout is unscored: power 0.5^2 x 2 and energy 2 of the first alone, whose advantages are all alike
    rollouts = groups([[1.0, NAN]], norms=[[[1.0, 1.0], [2.0]]])
    metrics = energy_metrics(rollouts, torch.tensor([[[0.5, 0.5], [0.0, 0.0]]]))
    assert metrics == {"energy_mean": 2.0, "energy_spread": 0.0, "total_power": 0.5, "verl_power": 0.5}


ENERGY = [sequence_energy, otb, otb_own, otb_carry, otb_loo, otb_carry_loo, sequence_energy_loo]


@pytest.mark.parametrize("baseline", ENERGY, ids=label)
@pytest.mark.parametrize("low", [-3.0, 0.0, 0.5])
def test_baseline_never_leaves_the_range_of_the_rewards_at_probabilities_near_one(baseline, low):
    generator = torch.Generator().manual_seed(0)
    short_of_one = torch.rand(40, 4, 30, generator=generator, dtype=torch.float64) * 1e-6
    short_of_one[:, :, 0] = 0  # a certain first token
    log_probs = torch.log1p(-short_of_one).float()
    log_sum_sq = torch.log((1 - short_of_one) ** 2 + short_of_one**2 / 3).float()  # the rest over three tokens
    norms = logit_gradient_proxy(log_probs, log_sum_sq)
    lengths = torch.randint(1, 31, (40, 4), generator=generator)
    norms = norms * (torch.arange(30) < lengths.unsqueeze(-1))
    rewards = low + torch.rand(40, 4, generator=generator)
    rollouts = RolloutGroups(rewards, lengths, norms)
    value = baseline(rollouts)
    counted = rollouts.alive.any(1, keepdim=True) & ~(rollouts.lone if baseline is otb else torch.tensor(False))
    value, counted = value.expand(40, 4, 30), counted.expand(40, 4, 30)
    lowest, highest = rewards.amin(1).view(40, 1, 1), rewards.amax(1).view(40, 1, 1)
    assert ((value >= lowest - 1e-6) & (value <= highest + 1e-6))[counted].all()


@of_every_baseline
def test_baseline_functions_do_not_change_their_input(baseline):
    rollouts = seen_by(baseline, random_groups())

    def tensors():
        fields = [rollouts.rewards, rollouts.lengths, rollouts.sequence_norms]
        fields += [getattr(rollouts, name) for name in PER_TOKEN]
        return [*fields, *rollouts.reduced.values(), *rollouts.totals.values()]

    before = [tensor.clone() for tensor in tensors()]
    advantages(rollouts, baseline(rollouts))
    for tensor, unchanged in zip(tensors(), before, strict=True):
        assert torch.equal(tensor, unchanged)


# ---- advantages, score norms, own tokens, the contract


def test_advantages_are_zero_past_the_last_own_token_and_scaled_where_the_baseline_scales():
    rollouts = groups([[1.0, 0.0]], norms=[[[1.0, 1.0], [1.0]]])
    baseline = Baseline(torch.full((1, 1, 2), 0.5), torch.tensor(2.0))
    assert_baseline(advantages(rollouts, baseline), [[[0.25, 0.25], [-0.25, 0.0]]])


def test_proxy_is_the_squared_norm_of_the_logit_gradient():
    logits = torch.randn(50, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    log_probs = logits.log_softmax(-1)[:, 4]
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits))
    torch.testing.assert_close(w, gradient.square().sum(-1))


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_proxy_is_never_negative_in_float32(scale):
    logits = torch.randn(5000, 7, generator=torch.Generator().manual_seed(4)) * scale
    log_probs = logits.log_softmax(-1)
    w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits).unsqueeze(-1))
    assert w.min() >= 0 and w.max() <= 2 + 1e-5


@pytest.mark.parametrize("gaps", [False, True])
def test_own_tokens_pack_and_unpack_are_inverse_on_own_tokens(gaps):
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    if gaps:
        mask = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    values = torch.arange(1.0, 13.0).view(3, 4)
    own = OwnTokens(mask)
    packed = own.pack(values)
    assert packed.shape == (3, 3) and own.lengths.tolist() == [2, 3, 0]
    if gaps:
        assert packed.tolist() == [[2, 4, 0], [5, 7, 8], [0, 0, 0]]
    assert torch.equal(own.unpack(packed), values * mask)


def test_tool_tokens_anywhere_change_no_advantage():
    """Own tokens of a rollout with a tool span get the same advantages as without the span."""
    generator = torch.Generator().manual_seed(5)
    norms, rewards = torch.rand(8, 6, generator=generator), torch.rand(2, 4, generator=generator)
    lengths = torch.tensor([6, 3, 4, 1, 2, 6, 5, 6])
    plain = torch.arange(6) < lengths.unsqueeze(-1)
    spread, spread_mask = torch.full((8, 12), 9.0), torch.zeros(8, 12, dtype=torch.bool)
    for row in range(8):
        places = torch.randperm(12, generator=generator)[: lengths[row]].sort().values
        spread[row, places], spread_mask[row, places] = norms[row, : lengths[row]], True

    def result(values, mask):
        own = OwnTokens(mask)
        rollouts = RolloutGroups(rewards, own.lengths.view(2, 4), own.pack(values).view(2, 4, -1))
        return own.unpack(advantages(rollouts, otb(rollouts)).flatten(0, 1))

    assert torch.equal(result(norms, plain)[plain], result(spread, spread_mask)[spread_mask])


def test_contract_reads_through_partials_and_plain_functions():
    assert needs_of(otb_carry) == {"score_norms"} and name_of(otb_carry) == "otb"
    assert needs_of(lambda rollouts: 0) == frozenset() and min_group_size_of(rloo) == 2
    assert is_unbiased(otb_carry) is False and is_unbiased(otb_loo_zero) and is_unbiased(lambda rollouts: 0) is None
    with pytest.raises(ValueError, match="cannot be supplied"):
        declare(needs={"telepathy"})
