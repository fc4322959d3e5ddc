"""Computes the statistics of a step's rollouts and advantages that the trainer logs.

`otb.records.metric_names.METRICS` has the unit and the definition of each name. What cannot be measured is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otb.baselines import Baseline
from otb.rollouts import RolloutGroups


def length_metrics(own_tokens: Tensor) -> dict[str, float]:
    """Returns the sum, mean and maximum of own tokens per rollout (B,) int, including rollouts that the loss masks."""
    return {
        "own_tokens": int(own_tokens.sum()),
        "response_length_mean": own_tokens.float().mean().item(),
        "response_length_max": int(own_tokens.max()),
    }


def reward_metrics(rollouts: RolloutGroups) -> dict[str, float]:
    """Returns statistics of the rewards of a step; only `unscored` if no rollout was scored."""
    metrics: dict[str, float] = {}
    if rollouts.scored.any():
        rewards = rollouts.rewards[rollouts.scored]
        lowest = rollouts.rewards.masked_fill(~rollouts.scored, float("inf")).amin(1)
        highest = rollouts.rewards.masked_fill(~rollouts.scored, -float("inf")).amax(1)
        metrics |= {
            "reward_mean": rewards.mean().item(),
            "reward_spread": rewards.std(correction=0).item(),
            "accuracy": (rewards == 1).float().mean().item(),
            "equal_reward_groups": (highest <= lowest).float().mean().item(),  # unscored groups: -inf <= inf
        }
    if unscored := (~rollouts.scored).float().mean().item():
        metrics["unscored"] = unscored
    return metrics


def advantage_metrics(rollouts: RolloutGroups, baseline: Baseline | Tensor, advantages: Tensor) -> dict[str, float]:
    """Returns statistics of the advantages (P, G, T or 1) and of the baseline; each own token counts once."""
    value = baseline.value if isinstance(baseline, Baseline) else baseline
    if advantages.shape[-1] == 1:  # the rollout's one value counts once for each of its own tokens
        weight = (rollouts.lengths * rollouts.scored).unsqueeze(-1).to(advantages.dtype)
    else:
        alive = rollouts.reached(advantages.shape[-1]) & rollouts.scored.unsqueeze(-1)
        weight = alive.to(advantages.dtype)
    if not (count := weight.sum()):
        return {}
    metrics: dict[str, float] = {}
    for name, values in (("advantage", advantages), ("baseline", value.expand(advantages.shape))):
        mean = (values * weight).sum() / count
        variance = ((values - mean).square() * weight).sum() / count
        metrics |= {f"{name}_mean": mean.item(), f"{name}_spread": variance.sqrt().item()}
    metrics["advantage_max"] = (advantages.abs() * (weight > 0)).max().item()
    return metrics


def energy_metrics(rollouts: RolloutGroups, advantages: Tensor) -> dict[str, float]:
    """Returns realized energy per scored rollout and the token-diagonal power sum_t w_t A_t^2, for any baseline.

    verl first averages token-level advantages to one scalar per rollout; its power is W_T times the square of that
    scalar. This differs from the power of the advantages used, so both are logged.
    """
    if not rollouts.scored.any():
        return {}
    score_norms = rollouts.required("score_norms")
    energy = score_norms.sum(-1)[rollouts.scored]
    power = (score_norms * advantages.square()).sum(-1)[rollouts.scored]
    tokens = rollouts.lengths.clamp(min=1) if advantages.shape[-1] > 1 else 1
    averaged = (advantages.sum(-1) / tokens)[rollouts.scored]
    return {
        "energy_mean": energy.mean().item(),
        "energy_spread": energy.std(correction=0).item(),
        "total_power": power.mean().item(),
        "verl_power": (energy * averaged.square()).mean().item(),
    }


def token_weight_metrics(signals: Tensor | None, factors: Tensor, own: Tensor) -> dict[str, float]:
    """Returns how unequal a step's token weights are, and statistics of their signals; {} without own tokens.

    signals (P, G, T) >= 0, None for uniform weights; factors, own bool (P, G, T), 0 past the last own token.
    """
    if not own.any():
        return {}
    metrics = {
        "token_weight_gini": gini(factors, own).nanmean().item(),
        "token_weight_support": effective_support(factors, own).nanmean().item(),
        "token_weight_mean": factors[own].mean().item(),
    }
    if signals is not None:
        metrics |= {"token_signal_mean": signals[own].mean().item(), "token_signal_max": signals[own].max().item()}
    return metrics


def gini(weights: Tensor, own: Tensor) -> Tensor:
    """Returns sum_i (2 i - n - 1) w_(i) / (n sum w), w_(i) ascending: 0 if all are equal, (n - 1) / n if one has all.

    weights (..., T) >= 0, own (..., T) bool, n of them True -> (...); NaN for n = 0.
    """
    n = own.sum(-1, keepdim=True)
    rank = torch.arange(1, own.shape[-1] + 1, device=own.device)
    ascending = weights.masked_fill(~own, torch.inf).sort(-1).values.masked_fill(rank > n, 0)
    return ((2 * rank - n - 1) * ascending).sum(-1) / (n.squeeze(-1) * ascending.sum(-1))


def effective_support(weights: Tensor, own: Tensor) -> Tensor:
    """Returns (sum w)^2 / (n sum w^2), the share of tokens that carry the weight: 1 if equal, 1 / n if one has all.

    Arguments and shapes as in `gini`.
    """
    kept = weights.masked_fill(~own, 0)
    return kept.sum(-1).square() / (own.sum(-1) * kept.square().sum(-1))
