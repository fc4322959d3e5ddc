"""The trajectory-wise control variate: what its value may depend on, and its two fits by loops and dense algebra."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from otb import OTBTrainer
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.score_norms import logit_gradient_proxy
from tests.groups import learned, random_groups
from tests.trainers import byte_reward, config, dataset


def with_probability(rollouts, where, probability):
    """The sampled token at `where` has another probability, and the distribution that it came from stays."""
    log_probs = rollouts.log_probs.clone()
    log_probs[where] = math.log(probability)
    return replace(rollouts, log_probs=log_probs, score_norms=proxy_of(rollouts, log_probs))


def proxy_of(rollouts, log_probs):
    return logit_gradient_proxy(log_probs, rollouts.log_sum_sq_probs) * rollouts.own


def test_value_at_the_last_token_does_not_see_that_token_and_earlier_values_see_its_luck():
    baseline, rollouts = learned(TrajectoryCV()), random_groups()
    longest = rollouts.lengths == rollouts.lengths.max()
    last = (*longest.nonzero()[0].tolist(), int(rollouts.lengths.max()) - 1)
    before = baseline(rollouts)
    after = baseline(with_probability(rollouts, last, 0.02))
    assert before[last] == after[last]
    assert not torch.isclose(before[last[:2]][: last[2]], after[last[:2]][: last[2]]).any()
    others = torch.ones_like(longest).index_put_((torch.tensor(last[0]), torch.tensor(last[1])), torch.tensor(False))
    assert torch.equal(before[others], after[others])  # no other rollout enters


def test_value_at_any_token_does_not_see_that_token_where_the_later_ones_are_certain():
    """Luck of later tokens is worth what the trace says, which the token is part of; certain tokens have no luck."""
    baseline, rollouts = learned(TrajectoryCV()), random_groups()
    log_probs, log_sum_sq_probs = rollouts.log_probs.clone(), rollouts.log_sum_sq_probs.clone()
    log_probs[:, :, 3:] = log_sum_sq_probs[:, :, 3:] = 0  # pi = sum pi^2 = 1
    certain = replace(rollouts, log_probs=log_probs, log_sum_sq_probs=log_sum_sq_probs)
    certain = replace(certain, score_norms=proxy_of(certain, log_probs))
    before, after = baseline(certain), baseline(with_probability(certain, (slice(None), slice(None), 2), 0.02))
    assert torch.equal(before[:, :, 2], after[:, :, 2])
    assert not torch.isclose(before, after)[:, :, 3][rollouts.own[:, :, 3]].any()  # the trace of what follows sees it


def test_what_stands_past_the_last_own_token_changes_nothing():
    step, following = random_groups(), random_groups(seed=1)

    def with_noise_behind(rollouts):
        noise = torch.rand_like(rollouts.log_probs).where(~rollouts.own, 0)
        changed = {name: getattr(rollouts, name) - noise for name in ("log_probs", "log_sum_sq_probs")}
        return replace(rollouts, score_norms=rollouts.score_norms + noise, **changed)

    baselines = TrajectoryCV(), TrajectoryCV()
    for baseline, given in zip(baselines, (step, with_noise_behind(step)), strict=True):
        baseline.update(given)
    values = [
        baseline(given)[following.own]
        for baseline, given in zip(baselines, (following, with_noise_behind(following)), strict=True)
    ]
    torch.testing.assert_close(*values)


# ---- the two fits, by loops over tokens and by least squares


def trace_of(pi, concentration, w):
    """phi_t of one rollout by the definitions: lists over its tokens -> (T, 14)."""
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


def least_squares(x, reward, w, rollouts: int, pseudo_rollouts: float):
    """argmin sum w (R - a - b . x)^2 + pseudo_rollouts / rollouts sum w |b * spread|^2 -> b, a."""
    mean = np.average(x, axis=0, weights=w)
    spread = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=w))
    z = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    penalty = np.sqrt(pseudo_rollouts * w.sum() / rollouts) * np.eye(z.shape[1])[:-1]  # the intercept is free
    rows = np.concatenate([z * np.sqrt(w)[:, None], penalty])
    fit = np.linalg.lstsq(rows, np.concatenate([reward * np.sqrt(w), np.zeros(len(penalty))]), rcond=None)[0]
    return fit[:-1] / spread, fit[-1] - (fit[:-1] / spread) @ mean


class Dense:
    """What a step says of each rollout: arrays over its tokens."""

    def __init__(self, step):
        self.rollouts = []
        for p, g in np.ndindex(*step.rewards.shape):
            length = int(step.lengths[p, g])
            read = [getattr(step, name)[p, g, :length].double().numpy() for name in ("log_probs", "log_sum_sq_probs")]
            pi, concentration = (np.exp(values) for values in read)
            w = 1 - 2 * pi + concentration
            self.rollouts.append((trace_of(pi, concentration, w), pi, concentration, w, float(step.rewards[p, g])))

    def stacked(self, features):
        """features(trace, pi, concentration) -> (T, D) of a rollout -> those of all tokens, rewards and w."""
        x = np.concatenate([features(*rollout[:3]) for rollout in self.rollouts])
        rewards = np.concatenate([np.full(len(rollout[0]), rollout[4]) for rollout in self.rollouts])
        return x, rewards, np.concatenate([rollout[3] for rollout in self.rollouts])


def test_value_is_that_of_two_dense_ridge_fits_of_the_step_before():
    step, following = random_groups(dtype=torch.float64), random_groups(seed=1, dtype=torch.float64)
    baseline, dense = TrajectoryCV(pseudo_rollouts=5.0), Dense(step)
    baseline.update(step)

    x, rewards, w = dense.stacked(lambda phi, pi, concentration: phi)
    slopes, intercept = least_squares(x, rewards, np.ones_like(w), 30, 5.0)

    def features(phi, pi, concentration):
        value = np.clip(phi @ slopes + intercept, rewards.min(), rewards.max())
        luck = pi - concentration
        q = np.column_stack([value * luck, value**2 * luck, value * concentration * luck])
        later = [q[t + 1 :].sum(0) for t in range(len(q))]
        return np.column_stack([phi, value, value**2, later])

    x, rewards, w = dense.stacked(features)
    assert x.shape[1] == 19  # and the intercept
    theta, constant = least_squares(x, rewards, w, 30, 5.0)
    expected = Dense(following).stacked(features)[0] @ theta + constant
    torch.testing.assert_close(baseline(following)[following.own], torch.from_numpy(expected))
    assert np.std(expected) > 0.01


def test_it_begins_with_the_mean_of_the_other_rollouts_and_refuses_a_ridge_of_nothing():
    rewards = random_groups().rewards
    torch.testing.assert_close(TrajectoryCV()(random_groups()).squeeze(-1), (rewards.sum(1, True) - rewards) / 5)
    with pytest.raises(ValueError, match="pseudo_rollouts=0 must be above 0"):
        TrajectoryCV(pseudo_rollouts=0)


# ---- in the trainer


class Keeping(TrajectoryCV):
    def __init__(self):
        super().__init__()
        self.kept = []

    def update(self, rollouts):
        self.kept.append(rollouts)
        super().update(rollouts)


@pytest.mark.parametrize("options", [dict(), dict(num_iterations=2, max_steps=4), dict(num_generations=1)])
def test_trainer_gives_it_the_probabilities_of_the_policy_that_sampled(tmp_path, untrained, tokenizer, options):
    given = config(tmp_path, temperature=0.7, **options)
    trainer = OTBTrainer(untrained, byte_reward, given, dataset(), processing_class=tokenizer, baseline=Keeping())
    trainer.train()
    assert trainer.baseline.fitted and len(trainer.baseline.kept) == 2
    for rollouts in trainer.baseline.kept:
        w = logit_gradient_proxy(rollouts.log_probs, rollouts.log_sum_sq_probs)
        torch.testing.assert_close(rollouts.score_norms, w * rollouts.own)
        assert rollouts.log_probs[rollouts.own].lt(0).all() and rollouts.log_probs[~rollouts.own].eq(0).all()
        assert rollouts.log_sum_sq_probs[~rollouts.own].eq(0).all()
