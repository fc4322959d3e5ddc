"""Tests which estimators are unbiased: expectations over all groups of a toy policy, and a bandit by hand."""

from functools import partial
from itertools import product

import pytest
import torch

from otb.advantages import advantages
from otb.baselines import carries_state, is_unbiased, min_group_size_of
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
from otb.baselines.value import Value
from otb.rollouts import RolloutGroups
from otb.score_norms import logit_gradient_proxy
from tests.support.baselines import configured_baselines
from tests.support.toy_policy import PREFIXES, RESPONSES, ToyPolicy

POLICY = ToyPolicy()
LOOSE = {"pseudo_rollouts": 1.0}  # a fit that predicts something after three small steps


def taught_and_corrected(size):
    """Returns a probe after three steps with the group correction on, whatever strength it would choose."""
    probe = POLICY.taught(EnergyProbe(group_correction=True, **LOOSE), size)
    probe._state["strength"] = torch.tensor(1.0)
    return probe


def cases(baselines: dict) -> dict:
    """Returns name -> maker, a function of the group size. Learned baselines are tried before and after three steps."""
    makers = {name: partial(POLICY.taught, baseline) for name, baseline in baselines.items()}
    at_first = {name: baseline for name, baseline in baselines.items() if carries_state(baseline)}
    return makers | {f"{name}_at_first": partial(POLICY.taught, b, steps=0) for name, b in at_first.items()}


CONFIGURED = configured_baselines()
UNBIASED = cases(
    {name: baseline for name, baseline in CONFIGURED.items() if is_unbiased(baseline)}
    | {
        "otb_loo_zero": partial(otb_loo, tail="zero"),
        "energy_probe_loose": EnergyProbe(**LOOSE),
        "energy_probe_corrected": EnergyProbe(group_correction=True),
        "value_fast": Value(learning_rate=0.1),
        "trajectory_cv_loose": TrajectoryCV(**LOOSE),
    }
) | {"energy_probe_corrected_by_force": taught_and_corrected}
BIASED = cases({name: baseline for name, baseline in CONFIGURED.items() if is_unbiased(baseline) is False})
# A rollout counts in its own baseline (or damping) with a weight that depends on the tokens that it multiplies.
SELF_INCLUSIVE = cases(
    {
        "otb": otb,
        "otb_own": partial(otb, tail="own"),
        "otb_carry": partial(otb, tail="carry"),
        "otb_exact": otb_exact,
        "sequence_energy": sequence_energy,
        "opo": opo,
        "ob_exact": ob_exact,
        "damped_probe": DampedProbe(**LOOSE),
    }
)


def relative_error(found, expected=POLICY.gradient):
    return float((found - expected).norm() / expected.norm())


def test_toy_policy_is_whole():
    assert len(RESPONSES) == 15 and len(PREFIXES) == 7
    torch.testing.assert_close(POLICY.probabilities.sum(), torch.tensor(1.0, dtype=torch.float64))
    # E[s] = 0; the proxy is the squared norm of a token's score, as the logits are the parameters
    assert torch.einsum("i,itd->d", POLICY.probabilities, POLICY.scores).abs().max() < 1e-15
    torch.testing.assert_close(POLICY.scores.square().sum(-1), POLICY.score_norms)
    assert POLICY.gradient.norm() > 0.1


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name, make in UNBIASED.items() for size in (1, 2, 3) if size >= min_group_size_of(make(2))],
)
def test_expected_gradient_is_the_gradient(name, size):
    """This holds for every baseline that declares `unbiased=True`."""
    baseline = UNBIASED[name](size)
    error = relative_error(POLICY.expected(baseline, size)[0])
    assert error < 1e-12, f"{name} declares unbiased=True, and its expected gradient is off by a share of {error:.2g}."
    if "at_first" not in name and name != "none" and size > 1:  # and there was a baseline
        assert POLICY.expected(baseline, size)[1] != POLICY.expected(none, size)[1]


@pytest.mark.parametrize("name", BIASED)
def test_baseline_that_declares_a_bias_has_one(name):
    """This holds with two or three rollouts a group for every baseline that declares `unbiased=False`."""
    errors = [relative_error(POLICY.expected(BIASED[name](size), size)[0]) for size in (2, 3)]
    assert max(errors) > 1e-6, f"{name} declares unbiased=False, and its expected gradient is the gradient."


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SELF_INCLUSIVE)
def test_self_inclusion_and_damping_change_the_expected_gradient_and_its_direction(name, size):
    expected, _ = POLICY.expected(SELF_INCLUSIVE[name](size), size)
    cosine = torch.cosine_similarity(expected, POLICY.gradient, dim=0)
    assert relative_error(expected) > 0.1 and 0.5 < cosine < 1 - 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_group_mean_shrinks_the_gradient_by_one_nth_and_grpo_bends_it(size):
    """R_i - mean R = (1 - 1 / N) (R_i - mean of the others); the deviation that grpo divides by depends on R_i."""
    expected, power = POLICY.expected(group_mean, size)
    torch.testing.assert_close(expected, POLICY.gradient * (size - 1) / size)
    assert power == pytest.approx(POLICY.expected(rloo, size)[1] * ((size - 1) / size) ** 2)
    bent = torch.cosine_similarity(POLICY.expected(grpo, size)[0], POLICY.gradient, dim=0)
    assert bent < 1 - 1e-3


def test_bias_of_otb_vanishes_with_the_group_and_an_advantage_of_0_in_the_tail_would_bias_leave_one_out():
    carry = partial(otb, tail="carry")
    assert relative_error(POLICY.expected(carry, 3)[0]) < relative_error(POLICY.expected(carry, 2)[0])

    def dropped_tail(rollouts):
        """Returns otb_loo with advantage 0 at lone tokens, which the docstring of otb_loo warns against."""
        value = otb_loo(rollouts)
        return rollouts.returns.where(rollouts.lone & rollouts.own, value)

    assert relative_error(POLICY.expected(dropped_tail, 2)[0]) > 0.05


@pytest.mark.parametrize("seed", [1, 2])
def test_learned_baselines_have_less_noise_than_rloo_at_two_rollouts_a_prompt(seed):
    """They learn for 20 steps. This is not a general law: the rewards of the 15 responses are random numbers."""
    policy = ToyPolicy(seed)
    for baseline in (EnergyProbe(**LOOSE), TrajectoryCV(**LOOSE), Value(learning_rate=0.1)):
        assert policy.expected(policy.taught(baseline, 2, steps=20), 2)[1] < policy.expected(rloo, 2)[1]


# ---- one token out of two: token 1 has probability p = 0.3 and reward r1 = 1, token 0 q = 0.7 and r0 = 0.2
#
# The scores are s(1) = q u and s(0) = -p u with u = (1, -1), so w(1) = 2 q^2, w(0) = 2 p^2, and the gradient is
# p q d u with d = r1 - r0. A group of two is (1, 1) with p^2, (0, 0) with q^2 and mixed with 2 p q.

P, Q, R1, R0 = 0.3, 0.7, 1.0, 0.2
D = R1 - R0
# One rollout without a baseline has variance 2 p q (q r1 + p r0)^2: it vanishes where E[w R] / E[w] = q r1 + p r0 is
# subtracted from the rewards. Two rollouts have half of it.
NONE = P * Q * (Q * R1 + P * R0) ** 2
# rloo: advantages d and -d in a mixed group, 0 else. g = (d q u + d p u) / 2 = d u / 2 with 2 p q, ||g||^2 = d^2 / 2:
# E||g||^2 = p q d^2, minus ||E g||^2 = 2 p^2 q^2 d^2.
RLOO = P * Q * D**2 * (1 - 2 * P * Q)
# Baselines that include the rollout itself multiply this g by a number, since only mixed groups have a gradient.
# With shares omega(1), omega(0) of the weight, the advantages are (1 - omega(1)) d and -(1 - omega(0)) d, so
# g = ((1 - omega(1)) q + (1 - omega(0)) p) d u / 2. Halves: 1 / 2. With w: omega(1) = q^2 / (p^2 + q^2), which gives
# (p^2 q + q^2 p) / (p^2 + q^2) = p q / (p^2 + q^2).
BY_ENERGY = P * Q / (P**2 + Q**2)
# grpo: (d / 2) / (d / sqrt 2 + 1e-4) instead of d
BY_DEVIATION = 0.5 / (D / 2**0.5 + 1e-4)
BANDIT = {
    "none": (none, 1, NONE),
    "rloo": (rloo, 1, RLOO),
    "otb_loo": (otb_loo, 1, RLOO),  # one other: whatever its weight, its reward is the mean
    "otb_carry_loo": (otb_carry_loo, 1, RLOO),
    "sequence_energy_loo": (sequence_energy_loo, 1, RLOO),
    "energy_probe_at_first": (EnergyProbe(), 1, RLOO),
    "trajectory_cv_at_first": (TrajectoryCV(), 1, RLOO),
    "group_mean": (group_mean, 1 / 2, RLOO / 4),
    "opo": (opo, 1 / 2, RLOO / 4),  # of equal lengths
    "grpo": (grpo, BY_DEVIATION, RLOO * BY_DEVIATION**2),
    "otb": (otb, BY_ENERGY, RLOO * BY_ENERGY**2),
    "otb_exact": (otb_exact, BY_ENERGY, RLOO * BY_ENERGY**2),
    "sequence_energy": (sequence_energy, BY_ENERGY, RLOO * BY_ENERGY**2),
    "ob_exact": (ob_exact, BY_ENERGY, RLOO * BY_ENERGY**2),
    "damped_probe_at_first": (DampedProbe(), BY_ENERGY, RLOO * BY_ENERGY**2),
}


@pytest.mark.parametrize("name", BANDIT)
def test_bandit_has_the_variance_that_is_worked_out_by_hand(name):
    baseline, scale, variance = BANDIT[name]
    tokens = torch.tensor(list(product([0, 1], repeat=2)))  # (4, 2): the groups
    log_probs = torch.tensor([Q, P], dtype=torch.float64).log()[tokens].unsqueeze(-1)
    log_sum_sq_probs = torch.full_like(log_probs, P**2 + Q**2).log()
    w = logit_gradient_proxy(log_probs, log_sum_sq_probs)
    rollouts = RolloutGroups(
        rewards=torch.tensor([R0, R1], dtype=torch.float64)[tokens],
        lengths=torch.ones_like(tokens),
        score_norms=w,
        sequence_norms=w.squeeze(-1),
        prefix_norms=w,
    )
    along_u = torch.tensor([-P, Q], dtype=torch.float64)[tokens]  # the score is this times u, and ||u||^2 = 2
    g = (advantages(rollouts, baseline(rollouts)).squeeze(-1) * along_u).mean(1)
    probability = log_probs.squeeze(-1).sum(1).exp()
    expected = probability @ g
    assert float(expected) == pytest.approx(scale * P * Q * D, rel=1e-6)
    assert float(2 * (probability @ g.square() - expected.square())) == pytest.approx(variance, rel=1e-6)
