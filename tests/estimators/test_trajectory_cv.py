"""Tests the trajectory-wise control variate: what its value depends on, and its two fits against dense algebra."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from otb import OTBTrainer
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.score_norms import logit_gradient_proxy
from tests.support.groups import learned, least_squares, random_groups, seen_by, token_states
from tests.support.trainers import byte_reward, config, dataset


def values(baseline, states):
    return baseline.reduce(states)[0]["values"]


def with_probability(states, where, probability):
    """Returns states in which the sampled token at `where` has another probability under the same distribution."""
    log_probs = states.log_probs.clone()
    log_probs[where] = math.log(probability)
    return replace(states, log_probs=log_probs, score_norms=proxy_of(states, log_probs))


def proxy_of(states, log_probs):
    return logit_gradient_proxy(log_probs, states.log_sum_sq_probs) * states.own


def test_value_at_the_last_token_does_not_see_that_token_and_earlier_values_see_its_luck():
    baseline, states = learned(TrajectoryCV()), token_states(random_groups())
    row, last = int(states.own.sum(-1).argmax()), int(states.own.sum(-1).max()) - 1
    before, after = values(baseline, states), values(baseline, with_probability(states, (row, last), 0.02))
    assert before[row, last] == after[row, last]
    assert not torch.isclose(before[row, :last], after[row, :last]).any()
    others = torch.arange(len(before)) != row
    torch.testing.assert_close(before[others], after[others])  # it affects no other rollout


def test_value_at_any_token_does_not_see_that_token_where_the_later_ones_are_certain():
    """Luck of later tokens depends on their trace, which includes this token; certain tokens have no luck."""
    baseline, states = learned(TrajectoryCV()), token_states(random_groups())
    log_probs, log_sum_sq_probs = states.log_probs.clone(), states.log_sum_sq_probs.clone()
    log_probs[:, 3:] = log_sum_sq_probs[:, 3:] = 0  # pi = sum pi^2 = 1
    certain = replace(states, log_probs=log_probs, log_sum_sq_probs=log_sum_sq_probs)
    certain = replace(certain, score_norms=proxy_of(certain, log_probs))
    before, after = values(baseline, certain), values(baseline, with_probability(certain, (slice(None), 2), 0.02))
    torch.testing.assert_close(before[:, 2], after[:, 2])
    assert not torch.isclose(before, after)[:, 3][states.own[:, 3]].any()  # the trace of later tokens includes it


def test_what_stands_past_the_last_own_token_changes_nothing():
    baseline, states = learned(TrajectoryCV()), token_states(random_groups(seed=1))
    noise = torch.rand_like(states.log_probs).where(~states.own, 0)
    behind = {name: getattr(states, name) - noise for name in ("log_probs", "log_sum_sq_probs")}
    noisy = replace(states, score_norms=states.score_norms + noise, **behind)
    (rows, totals), (noisy_rows, noisy_totals) = baseline.reduce(states), baseline.reduce(noisy)
    torch.testing.assert_close(totals, noisy_totals)
    torch.testing.assert_close(rows.pop("values")[states.own], noisy_rows.pop("values")[states.own])
    torch.testing.assert_close(rows, noisy_rows)


# ---- the two fits, by loops over tokens and by least squares


def trace_of(pi, concentration, w):
    """Returns phi_t of one rollout according to its definition: lists over its tokens -> (T, 14)."""
    rows = []
    for t in range(len(pi)):
        surprisal = [-math.log(p) for p in pi[:t]]
        total, energy, surprises = sum(surprisal), sum(w[:t]), sum(p < 0.3 for p in pi[:t])
        row = [total, math.sqrt(total), math.log1p(total), energy, math.log1p(energy)]
        row += [sum(min(s, 4.0) ** 2 for s in surprisal), surprises, 1 / (1 + surprises)]
        row += [sum(p - c for p, c in zip(pi[:t], concentration[:t], strict=True))]
        row += [([0, 0, *surprisal])[-1], ([0, 0, *surprisal])[-2], max([0, *surprisal]), math.sqrt(t)]
        rows.append([*row, concentration[t]])
    return np.array(rows)


class Dense:
    """A step's data per rollout, as arrays over its tokens. weight: of the step after the decay of later steps."""

    def __init__(self, step, weight=1.0):
        self.rollouts, states = [], token_states(step)
        for i, length in enumerate(states.own.sum(-1).tolist()):
            read = [getattr(states, name)[i, :length].double().numpy() for name in ("log_probs", "log_sum_sq_probs")]
            pi, concentration = (np.exp(each) for each in read)
            w = 1 - 2 * pi + concentration
            phi = np.column_stack([trace_of(pi, concentration, w), states.hidden_states[i, :length].numpy()])
            self.rollouts.append((phi, pi, concentration, w, float(step.rewards.flatten()[i])))
        self.weight = weight

    def stacked(self, features):
        """Returns the features, rewards, w and weights of all tokens. features(phi, pi, concentration) -> (T, D)."""
        x = np.concatenate([features(*rollout[:3]) for rollout in self.rollouts])
        rewards = np.concatenate([np.full(len(rollout[0]), rollout[4]) for rollout in self.rollouts])
        return x, rewards, np.concatenate([rollout[3] for rollout in self.rollouts]), np.full(len(x), self.weight)


def test_value_is_that_of_two_dense_ridge_fits_of_the_steps_before():
    """Steps have 30 rollouts. The first step fits U, the second B and q with that U; decay 0.9."""
    first, second, following = (random_groups(seed=seed, dtype=torch.float64) for seed in (0, 1, 2))
    baseline = TrajectoryCV(pseudo_rollouts=5.0)
    for step in (first, second):
        baseline.update(seen_by(baseline, step))

    def value_features(*steps):
        """Returns the features x of a rollout, with U fitted on `steps`."""
        phi, rewards, _, weights = map(
            np.concatenate, zip(*(s.stacked(lambda phi, *_: phi) for s in steps), strict=True)
        )
        rollouts = sum(30 * step.weight for step in steps)
        slopes, intercept = least_squares(phi, rewards, weights, rollouts, 5.0)

        def features(phi, pi, concentration):
            value = np.clip(phi @ slopes + intercept, rewards.min(), rewards.max())
            luck = pi - concentration
            q = np.column_stack([value * luck, value**2 * luck, value * concentration * luck])
            later = [q[t + 1 :].sum(0) for t in range(len(q))]
            return np.column_stack([value, value**2, later, phi])

        return features

    x, rewards, w, _ = Dense(second).stacked(value_features(Dense(first)))
    assert x.shape[1] == 5 + 14 + 4  # and the intercept
    theta, constant = least_squares(x, rewards, w, 30, 5.0)
    features = value_features(Dense(first, weight=0.9), Dense(second))
    expected = Dense(following).stacked(features)[0] @ theta + constant
    states = token_states(following)
    torch.testing.assert_close(values(baseline, states)[states.own], torch.from_numpy(expected))
    assert np.std(expected) > 0.01


def test_it_begins_with_the_mean_of_the_other_rollouts_and_refuses_a_ridge_of_nothing():
    """It lasts two steps: the first fits U, the second B and q."""
    rewards, baseline = random_groups().rewards, TrajectoryCV()
    for _ in range(2):
        value = baseline(seen_by(baseline, random_groups())).squeeze(-1)
        torch.testing.assert_close(value, (rewards.sum(1, True) - rewards) / 5)
        baseline.update(seen_by(baseline, random_groups(seed=1)))
    assert baseline(seen_by(baseline, random_groups())).shape == (5, 6, 9)
    with pytest.raises(ValueError, match="pseudo_rollouts=0 must be above 0"):
        TrajectoryCV(pseudo_rollouts=0)


# ---- in the trainer


class Keeping(TrajectoryCV):
    def __init__(self):
        super().__init__()
        self.kept = []

    def reduce(self, tokens):
        self.kept.append(tokens)
        return super().reduce(tokens)


@pytest.mark.parametrize("options", [dict(), dict(num_iterations=2, max_steps=4), dict(num_generations=1)])
def test_trainer_gives_it_the_probabilities_of_the_policy_that_sampled(tmp_path, untrained, tokenizer, options):
    given = config(tmp_path, temperature=0.7, **options)
    trainer = OTBTrainer(untrained, byte_reward, given, dataset(), processing_class=tokenizer, baseline=Keeping())
    trainer.train()
    assert trainer.baseline.fitted
    for states in trainer.baseline.kept:
        w = logit_gradient_proxy(states.log_probs, states.log_sum_sq_probs)
        torch.testing.assert_close(states.score_norms, w * states.own)
        assert states.log_probs[states.own].lt(0).all() and states.log_probs[~states.own].eq(0).all()
        assert states.log_sum_sq_probs[~states.own].eq(0).all()
