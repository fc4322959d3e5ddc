"""Energy-weighted mean of the returns of a group, shared by the energy baselines."""

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
