"""Energy-weighted means of the returns of a group, shared by the energy baselines.

`weighted_mean` counts a rollout in its own baseline, `mean_of_others` leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


def weighted_mean(rollouts: RolloutGroups, weights: Tensor, eps: float) -> Tensor:
    """m + sum_i weights_i (G_i - m) / (sum_i weights_i + eps), m = the smallest return of the scored rollouts.

    weights (P, G, T) >= 0, 0 for rollouts that do not count -> (P, 1, T).
    Deviation: the reference has m = 0, which eps pulls towards 0 where the weights are tiny; counted from m the mean
    never leaves the range of the returns, and equal rewards give exactly equal baselines. With rewards whose smallest
    is 0 the two are the same number (README, Choices).
    """
    scored = rollouts.scored.unsqueeze(-1)
    lowest = rollouts.returns.masked_fill(~scored, float("inf")).amin(dim=1, keepdim=True)  # (P, 1, T or 1)
    lowest = lowest.masked_fill(~scored.any(dim=1, keepdim=True), 0)
    above = rollouts.returns - lowest
    if above.shape[-1] == 1:  # terminal rewards: one pass over the weights serves both sums
        both = above.squeeze(-1).unsqueeze(1).expand(-1, 2, -1).clone()  # (P, 2, G)
        both[:, 1] = 1
        numerator, denominator = (both @ weights).split(1, dim=1)  # (P, 1, T) each
    else:
        numerator, denominator = (weights * above).sum(1, keepdim=True), weights.sum(1, keepdim=True)
    return lowest + numerator / (denominator + eps)


def token_weighted_mean(rollouts: RolloutGroups, energy: Tensor, tail: str, eps: float) -> Tensor:
    """OTB with any energy of the prefixes. energy (P, G, T), kept after the last own token -> (P, 1, T).

    tail: zero, own or carry, as in `otb.baselines.otb`. With one rollout a group there is no baseline: 0.
    """
    if tail not in ("zero", "own", "carry"):
        raise ValueError(f"tail={tail!r} is not one of zero, own, carry.")
    if tail == "carry":
        refuse_token_returns(rollouts, "tail='carry'")
    if rollouts.group_size == 1:
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, rollouts.tokens)
    counted = rollouts.scored.unsqueeze(-1) if tail == "carry" else rollouts.alive
    baseline = weighted_mean(rollouts, energy.where(counted, 0.0), eps)
    if tail == "zero":
        baseline = baseline.masked_fill(rollouts.lone, 0)
    return baseline


def refuse_token_returns(rollouts: RolloutGroups, name: str) -> None:
    if rollouts.token_returns is not None:
        raise ValueError(f"{name} keeps a finished rollout's reward; it needs terminal rewards, not token_returns.")


# ---- leave-one-out


def mean_of_others(rollouts: RolloutGroups, weights: Tensor | None = None, otherwise: Tensor | float = 0.0) -> Tensor:
    """sum_{j != i} weights_j G_j / sum_{j != i} weights_j; `otherwise` where the others weigh nothing.

    weights (P, G, T) >= 0, 0 for rollouts that do not count; None = 1 for each scored rollout -> (P, G, T), or
    (P, G, 1) without anything per token. A rollout's own reward and weights do not enter its value, not even rounded.
    """
    if weights is None:
        weights = rollouts.scored.unsqueeze(-1).to(rollouts.rewards.dtype)
    denominator = sum_of_others(weights)
    mean = sum_of_others(weights * rollouts.returns) / denominator
    return mean.where(denominator > 0, otherwise)


def sum_of_others(values: Tensor) -> Tensor:
    """sum_{j != i} values_j over the group. (P, G, ...) -> the same shape.

    As the sum of those before and those after: total minus own would cancel where one rollout holds nearly all.
    """
    import torch

    none = torch.zeros_like(values[:, :1])
    before = torch.cat([none, values[:, :-1].cumsum(1)], dim=1)
    after = torch.cat([values[:, 1:].flip(1).cumsum(1).flip(1), none], dim=1)
    return before + after
