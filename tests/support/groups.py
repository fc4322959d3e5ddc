"""Makes random prompt groups with everything that a baseline may need, and trains baselines on them."""

from dataclasses import fields, replace

import numpy as np
import torch

from otb.rollouts import RolloutGroups, TokenStates
from otb.score_norms import logit_gradient_proxy

WIDTH = 4  # of the hidden states


def random_groups(seed=0, prompts=5, group_size=6, tokens=9, dtype=torch.float32) -> RolloutGroups:
    """Returns random groups.

    Unlike in a real step, `reduced` holds the token states that `seen_by` reads: hidden (P, G, T, WIDTH), log_probs and
    log_sum_sq_probs (P, G, T).
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(prompts, group_size, *shape, generator=generator, dtype=dtype)

    lengths = torch.randint(1, tokens + 1, (prompts, group_size), generator=generator)
    own = torch.arange(tokens) < lengths.unsqueeze(-1)
    rewards, pi, spread = random(), random(tokens), random(tokens)
    log_probs = pi.clamp(0.01, 0.99).log() * own
    # the remaining probability lies on one other token (spread 1) or on very many (spread 0)
    log_sum_sq_probs = ((2 * log_probs).exp() + log_probs.expm1().square() * spread).log() * own
    return RolloutGroups(
        rewards=rewards,
        lengths=lengths,
        score_norms=logit_gradient_proxy(log_probs, log_sum_sq_probs) * own,
        sequence_norms=random() * 9,
        prefix_norms=(random(tokens) * own).cumsum(-1),
        reduced={
            "hidden": (random(tokens, WIDTH) - 0.3) * own.unsqueeze(-1),
            "log_probs": log_probs,
            "log_sum_sq_probs": log_sum_sq_probs,
        },
    )


def taken(rollouts: RolloutGroups, order: torch.Tensor) -> RolloutGroups:
    """Returns the rollouts `order` of each group with all their fields."""
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    per_rollout = {name: value[:, order] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(rollouts, reduced={name: rows[:, order] for name, rows in rollouts.reduced.items()}, **per_rollout)


def token_states(rollouts: RolloutGroups, rows=slice(None)) -> TokenStates:
    """Returns the TokenStates of the rollouts `rows`, counted across all groups."""

    def some(values):
        return None if values is None else values.flatten(0, 1)[rows]

    certain = torch.zeros_like(rollouts.score_norms)
    own = some(torch.arange(rollouts.score_norms.shape[2]) < rollouts.lengths.unsqueeze(-1))
    return TokenStates(
        own=own,
        hidden_states=some(rollouts.reduced["hidden"]) * own.unsqueeze(-1),
        log_probs=some(rollouts.reduced.get("log_probs", certain)),
        log_sum_sq_probs=some(rollouts.reduced.get("log_sum_sq_probs", certain)),
        score_norms=some(rollouts.score_norms),
        scored=some(rollouts.scored),
    )


def seen_by(baseline, rollouts: RolloutGroups) -> RolloutGroups:
    """Returns `rollouts` with the results of the baseline's `reduce`, or unchanged if it has no `reduce`."""
    if not hasattr(baseline, "reduce"):
        return rollouts
    rows, totals = baseline.reduce(token_states(rollouts))
    reduced = {name: row.unflatten(0, rollouts.rewards.shape) for name, row in rows.items()}
    return replace(rollouts, reduced=rollouts.reduced | reduced, totals=totals)


def learned(baseline, steps=3, **options):
    """Returns `baseline` after some steps."""
    for step in range(steps):
        baseline.update(seen_by(baseline, random_groups(seed=100 + step, **options)))
    return baseline


def least_squares(x, reward, w, rollouts: int, pseudo_rollouts: float):
    """Returns b, a = argmin sum w (R - a - b . x)^2 + pseudo_rollouts / rollouts sum w |b * spread|^2."""
    mean = np.average(x, axis=0, weights=w)
    spread = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=w))
    z = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    penalty = np.sqrt(pseudo_rollouts * w.sum() / rollouts) * np.eye(z.shape[1])[:-1]  # the intercept is free
    rows = np.concatenate([z * np.sqrt(w)[:, None], penalty])
    fit = np.linalg.lstsq(rows, np.concatenate([reward * np.sqrt(w), np.zeros(len(penalty))]), rcond=None)[0]
    return fit[:-1] / spread, fit[-1] - (fit[:-1] / spread) @ mean
