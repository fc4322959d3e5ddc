"""Tests PIPO's weights and scaled advantages against numbers worked out by hand, and what the command refuses."""

import math
import random
import re
import statistics

import pytest
import torch

from experiments.checks import check
from experiments.checks.methods import checked_methods
from experiments.running.identity import difference
from otb.errors import RunError
from otb.methods.improvement import PolicyImprovement, Reading, group_scales
from tests.support.recipes import composed


def readings(improvement, means) -> list[Reading]:
    return [improvement.observe(mean) for mean in means]


def test_xi_and_phi_follow_from_the_window_before_the_batch():
    """Windows (0.2 0.4 0.6), (0.4 0.6 0.8), (0.6 0.8 0.2): means 0.4, 0.6, 0.5333; deviations 0.2, 0.2, 0.3055."""
    means = [0.2, 0.4, 0.6, 0.8, 0.2, 0.5]
    found = readings(PolicyImprovement(window=3, negative_scale=0.1), means)
    assert found[:3] == [Reading(0.2), Reading(0.4), Reading(0.6)], "no weight before the window is full"
    assert [reading.mu_his for reading in found[3:]] == pytest.approx([0.4, 0.6, 1.6 / 3])
    assert [reading.xi for reading in found[3:]] == pytest.approx([2, -2, (0.5 - 1.6 / 3) / 0.3055050463], rel=1e-6)
    assert [reading.phi for reading in found[3:]] == pytest.approx([2, -0.2, -0.0109108945], rel=1e-6)
    assert found[0].metrics() == {"improvement_mu": 0.2}
    assert found[3].metrics() == {f"improvement_{name}": value for name, value in found[3]._asdict().items()}


def test_cap_bounds_xi_and_a_window_without_spread_counts_as_one_of_deviation_1():
    assert readings(PolicyImprovement(window=2, cap=1.5), [0.0, 0.2, 0.9])[-1].phi == 1.5  # 0.8 / 0.1414 = 5.66
    assert readings(PolicyImprovement(window=2, cap=1.5), [0.7, 0.9, 0.0])[-1].phi == pytest.approx(-0.15)
    assert readings(PolicyImprovement(window=2), [0.1, 0.1, 0.6])[-1].xi == pytest.approx(0.5)
    assert readings(PolicyImprovement(window=2), [0.1, 0.1, 0.1])[-1].phi == 0


def test_a_batch_without_a_scored_rollout_leaves_the_window_as_it_is():
    improvement = PolicyImprovement(window=2)
    found = readings(improvement, [0.0, math.nan, 0.2, math.nan, 0.5])
    assert found[1] == found[3] == Reading()
    assert found[4].mu_his == pytest.approx(0.1)


def test_constant_has_one_weight_whatever_the_rewards():
    found = readings(PolicyImprovement("constant", window=2), [0.1, 0.9, 0.2, 0.7])
    assert [reading.phi for reading in found] == [None, None, 0.43, 0.43]
    assert [reading.xi for reading in found[2:]] == [
        reading.xi for reading in readings(PolicyImprovement(window=2), [0.1, 0.9, 0.2, 0.7])[2:]
    ]


def test_shuffled_draws_from_the_xi_of_earlier_batches_alone_and_by_its_seed():
    draw = random.Random(0)
    means = [draw.gauss(0.5, 0.1) for _ in range(60)]
    pipo, shuffled = PolicyImprovement(window=4), PolicyImprovement("shuffled", window=4)
    of_pipo, of_shuffled = readings(pipo, means), readings(shuffled, means)
    assert [reading.xi for reading in of_shuffled] == [reading.xi for reading in of_pipo]
    assert [reading.phi for reading in of_shuffled[:5]] == [None] * 5, "the first xi has none before it"
    for step, reading in enumerate(of_shuffled[5:], start=5):
        assert reading.phi in [earlier.phi for earlier in of_pipo[4:step]]
    assert readings(PolicyImprovement("shuffled", window=4), means) == of_shuffled
    assert readings(PolicyImprovement("shuffled", window=4, seed=1), means) != of_shuffled


def test_shuffled_has_the_weights_of_pipo_without_what_their_sign_says():
    """On a plateau of 4,000 batches both means are near 0.43, and the signs agree in half of the cases."""
    draw = random.Random(0)
    means = [draw.gauss(0.5, 0.1) for _ in range(4000)]
    weights = {
        mode: [reading for reading in readings(PolicyImprovement(mode), means) if reading.phi is not None]
        for mode in ("pipo", "shuffled")
    }
    for mode, found in weights.items():
        assert statistics.fmean(reading.phi for reading in found) == pytest.approx(0.43, abs=0.05), mode
    agree = [(reading.phi > 0) == (reading.xi > 0) for reading in weights["shuffled"]]
    assert statistics.fmean(agree) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("mode", ["pipo", "shuffled"])
@pytest.mark.parametrize("kept_at", [1, 3, 7])
def test_a_resumed_window_goes_on_as_an_uninterrupted_one(mode, kept_at):
    means = [0.3, 0.1, 0.4, 0.1, 0.5, 0.9, 0.2, 0.6, 0.5, 0.3, 0.5]
    whole = readings(PolicyImprovement(mode, window=3), means)
    first, resumed = PolicyImprovement(mode, window=3), PolicyImprovement(mode, window=3)
    assert readings(first, means[:kept_at]) == whole[:kept_at]
    resumed.load_state_dict(first.state_dict())
    assert readings(resumed, means[kept_at:]) == whole[kept_at:]


def test_scaled_advantages_are_those_of_the_paper_with_the_shape_over_tokens_kept():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, torch.nan, 0.0]])
    per_rollout = torch.tensor([[0.5, -0.5, -0.5, 0.5], [1e-7, 0.0, 0.0, -1e-7], [1.0, -0.5, 0.0, -0.5]]).unsqueeze(-1)
    lengths = torch.tensor([[2, 1, 2, 2], [1, 1, 1, 1], [2, 2, 0, 1]])
    scales = group_scales(rewards, per_rollout, lengths)
    assert scales.tolist() == [[2.0], [0.0], [2.0]]  # 4 / (4 x 0.5), equal rewards, 4 / 2
    # the same means per rollout, from tokens: (0.2, 0.8) has mean 0.5 over two own tokens
    per_token = torch.zeros(3, 4, 2)
    per_token[0] = torch.tensor([[0.2, 0.8], [-0.5, 0.0], [-0.5, -0.5], [0.9, 0.1]])
    per_token[2] = torch.tensor([[1.0, 1.0], [-0.3, -0.7], [0.0, 0.0], [-0.5, 0.0]])
    torch.testing.assert_close(group_scales(rewards, per_token, lengths), scales)


def test_an_improvement_step_undoes_part_of_a_harmful_update_and_lambda_says_how_much():
    """The policy is a softmax over three arms. The judged update pushed the best arm down, so the mean reward fell."""

    def policy_after(negative_scale) -> list[float]:
        logits, rewards = torch.zeros(3, requires_grad=True), torch.tensor([1.0, 0.0, 0.0])
        improvement = PolicyImprovement(window=2, negative_scale=negative_scale)
        readings(improvement, [0.3, 0.36])

        def step(advantages):
            gradient = torch.autograd.grad((logits.softmax(-1) * advantages).sum(), logits)[0]
            with torch.no_grad():
                logits.add_(gradient)
            return (logits.detach().softmax(-1) * rewards).sum().item()

        before, harmful = (logits.softmax(-1) * rewards).sum().item(), -(rewards - 1 / 3)
        after = step(harmful)
        reading = improvement.observe(after)
        assert reading.xi < 0
        return [before, after, step(reading.phi * harmful)]

    before, after, undone = policy_after(0.1)
    assert after < undone < before
    assert policy_after(0.0)[2] == after and undone < policy_after(0.2)[2] < before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(window=2.5), "window=2.5 must be a whole number >= 2"),
        (dict(window=1), "window=1 must be a whole number >= 2, as one reward has no deviation. Try window=8"),
        (dict(negative_scale=-0.1), "negative_scale=-0.1 must be a number from 0 to 1"),
        (dict(weight=0.0), "weight=0.0 must be a number other than 0"),
        (dict(eps=0.0), "eps=0.0 must be a positive number"),
        (dict(cap=-1.0), "cap=-1.0 must be a positive number, or null for none"),
        (dict(mode="best"), "mode=best is not one of pipo, constant, shuffled"),
        (dict(advantages="mean"), "advantages=mean is not one of native, scaled"),
    ],
)
def test_values_out_of_range_are_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        PolicyImprovement(**options)


REFUSED = {  # overrides beside improvement=pipo -> what the message says
    "improvement.window=1": ("improvement.window=1", "one reward has no deviation", "Try improvement.window=8"),
    "improvement.window=2.5": ("improvement.window=2.5", "must be a whole number"),
    "improvement.advantages=mean": ("improvement.advantages=mean", "not one of native, scaled"),
    "trainer.loss_type=cispo": ("trainer.loss_type=cispo", "no clipped ratio", "Use trainer.loss_type=grpo"),
    "parallel=fsdp2": ("parallel=fsdp2", "Use parallel=ddp", "or improvement=none"),
    "rollouts_by=vllm": ("rollouts_by=vllm", "Use rollouts_by=hf", "or improvement=none"),
    "steps=8": ("steps=8", "improvement.window=8", "Use steps=32"),
    "improvement=shuffled steps=9": ("steps=9", "improvement.window=8 steps and one to draw from", "Use steps=32"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_go_with_improvement_updates_is_refused_before_a_model_loads(overrides):
    with pytest.raises(RunError) as refusal:
        check(composed("improvement=pipo", *overrides.split()))
    assert all(part in str(refusal.value) for part in REFUSED[overrides]), refusal.value


def test_every_choice_builds_what_it_names():
    assert checked_methods(composed()) == {}, "off, the trainer is built of the arguments that it was built of before"
    for mode in ("pipo", "constant", "shuffled"):
        cfg = composed(f"improvement={mode}", "seed=3")
        check(cfg)
        (built,) = checked_methods(cfg).values()
        assert (built.mode, built.window, built.advantages, built.cap) == (mode, 8, "native", None)
        assert built.weight == 0.43 and built.negative_scale == 0.1
        assert built.seed is None, "the trainer's, so that runs that differ by their seed alone are of one setting"
    check(composed("improvement=shuffled", "steps=10"))
    check(composed("improvement=pipo", "steps=9", "rollouts_by=hf_bfloat16", "schedule=length_triggered"))


def test_off_is_the_run_that_older_directories_hold():
    new = {"improvement": {"_target_": None}, "seed": 0}
    assert difference({"seed": 0}, new) == []
    assert difference(new, new | {"improvement": {"_target_": "otb.methods.improvement.PolicyImprovement"}}) != []
