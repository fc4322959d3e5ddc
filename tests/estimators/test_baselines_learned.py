"""Tests baselines that learn over the steps (probes, the value model) with identities and dense computations."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from otb.advantages import advantages
from otb.baselines.damped_probe import DampedProbe
from otb.baselines.energy_probe import STRENGTHS, EnergyProbe
from otb.baselines.rloo import rloo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.baselines.value import Value
from otb.rollouts import RolloutGroups
from tests.support.groups import learned, least_squares, random_groups, seen_by, token_states

PROBES = {
    "energy_probe": EnergyProbe,
    "corrected": partial(EnergyProbe, group_correction=True),
    "damped": DampedProbe,
    "value": Value,
    "trajectory_cv": TrajectoryCV,
}
REDUCING = {name: make for name, make in PROBES.items() if hasattr(make(), "reduce")}


def value_of(baseline, rollouts):
    return baseline(seen_by(baseline, rollouts))


# ---- learning over the steps


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_value_of_a_step_does_not_depend_on_its_own_rewards_but_those_of_the_next_do(make):
    def after(rewards):
        baseline = learned(make())
        rollouts = replace(random_groups(), rewards=rewards)
        value = value_of(baseline, rollouts)
        value = getattr(value, "value", value)
        baseline.update(seen_by(baseline, rollouts))
        following = value_of(baseline, random_groups(seed=1))
        return value, getattr(following, "value", following)

    rewards = random_groups().rewards
    first, second = after(rewards), after(rewards.flip(1))
    if make is not PROBES["corrected"]:  # only the others' rewards affect it
        assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


def test_group_correction_of_a_rollout_does_not_depend_on_its_own_reward():
    baseline, rollouts = learned(EnergyProbe(group_correction=True)), random_groups()
    baseline._state["strength"] = torch.tensor(1.0)
    rewards = rollouts.rewards.clone()
    rewards[:, 2] = 5.0
    before, after = value_of(baseline, rollouts), value_of(baseline, replace(rollouts, rewards=rewards))
    assert torch.equal(before[:, 2], after[:, 2]) and not torch.equal(before[:, 1], after[:, 1])


def dense_ridge(rollouts: RolloutGroups, weights, pseudo_rollouts: float):
    """Returns slopes and intercept on all tokens' states: weighted least squares in numpy, ridge on standardised h."""
    own = rollouts.own.numpy()
    h, w = rollouts.reduced["hidden"].double().numpy()[own], weights.double().numpy()[own]
    reward = np.broadcast_to(rollouts.rewards.double().numpy()[..., None], own.shape)[own]
    return least_squares(h, reward, w, rollouts.rewards.numel(), pseudo_rollouts)


@pytest.mark.parametrize("pseudo_rollouts", [1.0, 100.0])
def test_energy_probe_is_the_dense_weighted_ridge_fit_of_the_step_before(pseudo_rollouts):
    probe, step = EnergyProbe(pseudo_rollouts), random_groups(dtype=torch.float64)
    probe.update(seen_by(probe, step))
    slopes, intercept = dense_ridge(step, step.score_norms, pseudo_rollouts)
    following = random_groups(seed=1, dtype=torch.float64)
    expected = torch.from_numpy(following.reduced["hidden"].numpy() @ slopes + intercept)
    expected = expected.clamp(step.rewards.min(), step.rewards.max())
    torch.testing.assert_close(value_of(probe, following)[following.own], expected[following.own])


def test_earlier_steps_count_less_by_the_decay():
    """The same step twice at decay 0.5 gives M = 0.5 M + M: the same fit as 1.5 times the rollouts once."""
    step = random_groups(dtype=torch.float64)
    twice = EnergyProbe(pseudo_rollouts=30.0, decay=0.5)
    for _ in range(2):
        twice.update(seen_by(twice, step))
    once = EnergyProbe(pseudo_rollouts=20.0)
    once.update(seen_by(once, step))
    torch.testing.assert_close(value_of(twice, step), value_of(once, step))


@pytest.mark.parametrize("make", REDUCING.values(), ids=REDUCING)
def test_two_micro_batches_are_one(make):
    baseline, rollouts = learned(make()), random_groups()
    whole, whole_totals = baseline.reduce(token_states(rollouts))
    parts = [baseline.reduce(token_states(rollouts, slice(*ends))) for ends in ((0, 7), (7, None))]
    for name, rows in whole.items():
        torch.testing.assert_close(torch.cat([kept[name] for kept, _ in parts]), rows)
    for name, total in whole_totals.items():
        torch.testing.assert_close(sum(totals[name] for _, totals in parts), total)


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES)
def test_state_survives_a_file_and_goes_on_as_if_nothing_had_happened(make, tmp_path):
    kept, restored = learned(make()), make()
    torch.save(kept.state_dict(), tmp_path / "state.pt")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in (1, 2):
        step = random_groups(seed=seed)
        mine, theirs = value_of(restored, step), value_of(kept, step)
        assert torch.equal(getattr(mine, "value", mine), getattr(theirs, "value", theirs))
        kept.update(seen_by(kept, step))
        restored.update(seen_by(restored, step))
    fresh = make()
    fresh.load_state_dict(make().state_dict())  # from a run that was killed before its first update
    fresh.update(seen_by(fresh, step))


@pytest.mark.parametrize("make", [EnergyProbe, partial(EnergyProbe, group_correction=True), Value, TrajectoryCV])
def test_one_rollout_a_prompt_is_enough(make):
    step = random_groups(prompts=12, group_size=1)
    baseline = learned(make(), prompts=12, group_size=1)
    value = value_of(baseline, step)
    assert value.shape == step.score_norms.shape and value[step.own].std() > 0


def test_probe_begins_with_the_mean_of_the_other_rollouts():
    torch.testing.assert_close(value_of(EnergyProbe(), random_groups()), rloo(random_groups()))
    assert value_of(EnergyProbe(), random_groups(group_size=1)).eq(0).all()


def test_probe_stays_in_the_range_of_the_rewards_seen():
    probe, step = learned(EnergyProbe(pseudo_rollouts=1e-3)), random_groups()
    seen = torch.cat([random_groups(seed=100 + i).rewards for i in range(3)])
    far = replace(step, reduced=step.reduced | {"hidden": step.reduced["hidden"] * 1e3})
    value = value_of(probe, far)[far.own]
    torch.testing.assert_close(value.aminmax(), torch.return_types.aminmax((seen.min(), seen.max())))


def test_unscored_rollouts_teach_nothing():
    step = random_groups()
    rewards = step.rewards.clone()
    rewards[:, 4] = torch.nan
    odd = {name: values.clone() for name, values in step.reduced.items()}
    odd["hidden"][:, 4] *= 100
    odd["log_probs"][:, 4] *= 2
    for make in PROBES.values():
        one, other = make(), make()
        one.update(seen_by(one, replace(step, rewards=rewards)))
        other.update(seen_by(other, replace(step, rewards=rewards, reduced=odd)))
        others = [0, 1, 2, 3, 5]
        mine, theirs = (value_of(baseline, step) for baseline in (one, other))
        torch.testing.assert_close(getattr(mine, "value", mine)[:, others], getattr(theirs, "value", theirs)[:, others])
        one.update(seen_by(one, replace(step, rewards=rewards * torch.nan)))  # a step without any reward


def test_damped_probe_is_the_probe_times_the_share_of_energy_that_is_not_ones_own():
    damped, probe, rollouts = learned(DampedProbe()), learned(EnergyProbe()), random_groups()
    share = rollouts.energy / rollouts.energy.sum(1, keepdim=True)
    expected = (1 - share) * (rollouts.returns - value_of(probe, rollouts)) * rollouts.alive
    seen = seen_by(damped, rollouts)
    torch.testing.assert_close(advantages(seen, damped(seen)), expected)


# ---- the group correction


def hidden_quality(seed: int, spread: float, tilt: float, prompts=64, group_size=8, tokens=6) -> RolloutGroups:
    """Returns a step whose states predict the reward only in part: a factor per prompt shows in no state."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(prompts, group_size, 1, 2, generator=generator).expand(-1, -1, tokens, -1)
    share = 1 + spread * (2 * torch.rand(prompts, 1, generator=generator) - 1)
    expected = (0.25 + tilt * (hidden[:, :, 0, 0] - 0.5)) * share
    rewards = (torch.rand(prompts, group_size, generator=generator) < expected).float()
    lengths = torch.full((prompts, group_size), tokens)
    return RolloutGroups(rewards, lengths, torch.ones(prompts, group_size, tokens), reduced={"hidden": hidden})


def test_group_correction_helps_where_prompts_differ_and_is_off_where_they_do_not():
    def trained(spread):
        probe = EnergyProbe(group_correction=True)
        for step in range(12):
            probe.update(seen_by(probe, hidden_quality(step, spread, tilt=0.3)))
        return probe

    def loss(probe, correct: bool):
        rollouts = hidden_quality(99, 1.0, tilt=0.3)
        probe.group_correction, kept = correct, probe.group_correction
        value = value_of(probe, rollouts) if correct else probe.values(seen_by(probe, rollouts))
        probe.group_correction = kept
        return float((rollouts.returns - value).square().mean())

    differing, alike = trained(1.0), trained(0.0)
    assert float(alike._state["strength"]) >= 100
    assert float(differing._state["strength"]) < 100
    assert loss(differing, correct=True) < 0.95 * loss(differing, correct=False)


def test_strength_has_the_smallest_leave_one_out_loss_predicted_before_the_fit():
    probe = EnergyProbe(group_correction=True, decay=0.0, pseudo_rollouts=5.0)
    first, second = (hidden_quality(seed, 1.0, tilt=0.3, prompts=8) for seed in (0, 1))
    probe.update(seen_by(probe, first))
    seen, state = seen_by(probe, second), dict(probe._state)
    last = second.reduced["hidden"][:, :, -1].double()
    expected = last @ state["last_coefficients"][:-1] + state["last_coefficients"][-1] - state["low"]  # U (P, G)
    rewards, losses = second.rewards.double() - state["low"], []
    for k in STRENGTHS:
        loss = 0.0
        for p in range(8):
            for i in range(8):
                others = [j for j in range(8) if j != i]
                above = sum(expected[p, j] * (rewards[p, j] - expected[p, j]) for j in others)
                share = above / (sum(expected[p, j] ** 2 for j in others) + k * state["mean_square"])
                value = (state["low"] + (seen.reduced["values"][p, i].double() - state["low"]) * (1 + share)).clamp(
                    0, 1
                )
                loss += (second.score_norms[p, i] * (second.rewards[p, i] - value) ** 2).sum()
        losses.append(float(loss))
    probe.update(seen)
    torch.testing.assert_close(probe._state["losses"], torch.tensor(losses, dtype=torch.float64))
    assert float(probe._state["strength"]) == STRENGTHS[int(np.argmin(losses))]


# ---- the value model


def test_value_takes_adam_steps_on_the_mean_squared_error_over_own_tokens():
    """The reference is autograd on the states of all tokens with a second Adam."""
    value, head = Value(learning_rate=0.01, epochs=3), torch.zeros(5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([head], lr=0.01)
    for seed in (0, 1):
        step = random_groups(seed=seed)
        value.update(seen_by(value, step))
        hidden = step.reduced["hidden"].double()
        for _ in range(3):
            adam.zero_grad()
            predicted = hidden @ head[:-1] + head[-1]
            (predicted - step.rewards.double().unsqueeze(-1)).square()[step.own].mean().backward()
            adam.step()
    torch.testing.assert_close(value._head.data, head.data)
    torch.testing.assert_close(value_of(value, step)[step.own], predicted_by(head, step))


def predicted_by(head, step):
    return (step.reduced["hidden"].double() @ head.detach()[:-1] + head.detach()[-1])[step.own].float()


def test_value_learns_what_the_states_tell():
    value = Value(learning_rate=0.02)
    for seed in range(20):
        step = random_groups(seed=seed)
        value.update(seen_by(value, replace(step, rewards=step.reduced["hidden"][:, :, 0, 0])))
    step = random_groups(seed=50)
    first = value_of(value, step)[:, :, 0]
    assert torch.corrcoef(torch.stack([first.flatten(), step.reduced["hidden"][:, :, 0, 0].flatten()]))[0, 1] > 0.8
