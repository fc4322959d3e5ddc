"""Baselines over the other rollouts, and baselines with exact norms: identities between them, and literals."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from otb.advantages import advantages
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.otb_carry_loo import otb_carry_loo
from otb.baselines.otb_exact import otb_exact
from otb.baselines.otb_loo import otb_loo
from otb.baselines.sequence_energy import sequence_energy
from otb.baselines.sequence_energy_loo import sequence_energy_loo
from otb.rollouts import RolloutGroups
from tests.support.groups import random_groups


@pytest.mark.parametrize(
    ("inclusive", "leave_one_out", "energy"),
    [
        (partial(otb, tail="carry", eps=0.0), otb_carry_loo, lambda rollouts: rollouts.energy),
        (partial(sequence_energy, eps=0.0), sequence_energy_loo, lambda rollouts: rollouts.energy[..., -1:]),
    ],
    ids=["otb", "sequence_energy"],
)
def test_being_in_ones_own_baseline_damps_the_advantage_by_ones_share_of_the_energy(inclusive, leave_one_out, energy):
    """A_i = (1 - omega_i) (R_i - B_without_i), omega = W_i / sum W."""
    rollouts = random_groups(dtype=torch.float64)
    share = energy(rollouts) / energy(rollouts).sum(1, keepdim=True)
    damped = (1 - share) * (rollouts.returns - leave_one_out(rollouts))
    torch.testing.assert_close(
        advantages(rollouts, inclusive(rollouts)), damped * rollouts.alive[..., : share.shape[2]]
    )


def test_otb_with_its_own_tail_damps_the_leave_one_out_advantage_where_others_are_alive():
    rollouts = random_groups(dtype=torch.float64)
    energy = rollouts.energy * rollouts.alive
    share = energy / energy.sum(1, keepdim=True).clamp(min=1e-300)
    damped = (1 - share) * (rollouts.returns - otb_loo(rollouts)) * rollouts.alive
    torch.testing.assert_close(advantages(rollouts, otb(rollouts, tail="own", eps=0.0)), damped)


def test_otb_loo_compares_with_the_others_alive_and_in_its_tails_with_those_that_ended():
    # W: first 1, 3, 4; second 3, 4; third 2. R: 1, 0, 0.5.
    norms = torch.tensor([[[1.0, 2.0, 1.0], [3.0, 1.0, 0.0], [2.0, 0.0, 0.0]]])
    rollouts = RolloutGroups(torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[3, 2, 1]]), norms)
    # t=1, first: (3 x 0 + 2 x 0.5) / 5; second: (1 x 1 + 2 x 0.5) / 3; third: (1 x 1 + 3 x 0) / 4
    # t=2, first: only the second, 0; second: only the first, 1. t=3, first: none; ended: (4 x 0 + 2 x 0.5) / 6
    carry, zero = otb_loo(rollouts), otb_loo(rollouts, tail="zero")
    for value, beyond in ((carry, 1 / 6), (zero, 0.0)):
        torch.testing.assert_close(value[0, 0], torch.tensor([1 / 5, 0.0, beyond]))
        torch.testing.assert_close(value[0, 1, :2], torch.tensor([2 / 3, 1.0]))
        torch.testing.assert_close(value[0, 2, :1], torch.tensor([1 / 4]))
    # the third's value at t=2, after its end, does not matter; carry-forward keeps the third's 0.5 with W = 2
    torch.testing.assert_close(otb_carry_loo(rollouts)[0, 0, 1], torch.tensor((4 * 0 + 2 * 0.5) / 6))


@pytest.mark.parametrize("baseline", [otb_loo, partial(otb_loo, tail="zero"), otb_carry_loo, sequence_energy_loo])
def test_leave_one_out_value_does_not_move_with_ones_own_reward_energies_or_length(baseline):
    rollouts = random_groups()
    rewards, norms, lengths = rollouts.rewards.clone(), rollouts.score_norms.clone(), rollouts.lengths.clone()
    rewards[:, 2] += 1e4
    norms[:, 2] = torch.rand(5, 9) * 1e6
    lengths[:, 2] = 9
    changed = RolloutGroups(rewards, lengths, norms)
    before, after = baseline(rollouts), baseline(changed)
    assert torch.equal(before[:, 2], after[:, 2])  # to the bit: a total minus one's own would not be
    assert not torch.equal(before[:, 1], after[:, 1])


def test_leave_one_out_where_the_others_are_certain_falls_back_on_their_plain_mean():
    norms = torch.tensor([[[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]])
    rollouts = RolloutGroups(torch.tensor([[0.0, 1.0, 0.5]]), torch.tensor([[2, 2, 2]]), norms)
    for baseline in (otb_carry_loo, partial(otb_loo, tail="zero")):
        torch.testing.assert_close(baseline(rollouts)[0, :, 0], torch.tensor([0.75, 0.0, 0.0]))


# ---- exact norms in the weights


def test_otb_exact_is_otb_with_other_weights():
    rollouts = random_groups()
    same = replace(rollouts, prefix_norms=rollouts.energy)
    for tail in ("zero", "own", "carry"):
        assert torch.equal(otb_exact(same, tail=tail), otb(rollouts, tail=tail))
    assert not torch.equal(otb_exact(rollouts), otb(rollouts))


def test_ob_exact_minimises_the_norm_weighted_squared_advantage():
    rollouts = random_groups(dtype=torch.float64)
    best = ob_exact(rollouts).squeeze(-1)

    def loss(baseline):
        return (rollouts.sequence_norms * (rollouts.rewards - baseline).square()).sum(1, keepdim=True)

    assert (loss(best + 1e-3) > loss(best)).all() and (loss(best - 1e-3) > loss(best)).all()
