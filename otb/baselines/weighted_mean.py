"""Computes weighted means of a group's returns, for the baselines that weight rollouts by energy.

`weighted_mean` includes a rollout in its own baseline; `mean_of_others` leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.values import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


def weighted_mean(rollouts: RolloutGroups, weights: Tensor, eps: float) -> Tensor:
    """Returns m + sum_i weights_i (G_i - m) / (sum_i weights_i + eps), with m = `lowest_return`.

    weights (P, G, T) >= 0, 0 for rollouts that do not count -> (P, 1, T).
    """
    lowest = lowest_return(rollouts)
    weighted, total = weighted_sums(rollouts.returns - lowest, weights)
    return lowest + weighted / (total + eps)


def lowest_return(rollouts: RolloutGroups) -> Tensor:
    """Returns the smallest return of each group's scored rollouts, 0 if none is scored. -> (P, 1, 1 or T).

    Deviation: the reference weights the raw returns, and eps pulls its mean towards 0 if the weights are tiny. With
    returns counted from the smallest, the mean never leaves their range, and equal rewards give exactly equal
    baselines. If the smallest reward is 0, both give the same number (docs/choices.md).
    """
    return lowest_of(rollouts.returns, rollouts.scored.unsqueeze(-1))


def lowest_reward(rollouts: RolloutGroups) -> Tensor:
    """Returns the smallest reward of each group's scored rollouts, 0 if none is scored. -> (P, 1).

    Means count rewards from it, so the mean of equal rewards is exact: a sum of many 0.7 is rounded, a sum of 0 is not.
    """
    return lowest_of(rollouts.rewards, rollouts.scored)


def mean_reward(rollouts: RolloutGroups) -> Tensor:
    """Returns the mean reward of each group's scored rollouts, 0 if none is scored. -> (P, 1)."""
    lowest = lowest_reward(rollouts)
    return lowest + (rollouts.rewards - lowest).nanmean(dim=1, keepdim=True).nan_to_num()


def lowest_of(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the smallest counted value of each group, 0 if none counts. (P, G, ...) -> (P, 1, ...)."""
    lowest = values.masked_fill(~counted, float("inf")).amin(dim=1, keepdim=True)
    return lowest.masked_fill(~counted.any(dim=1, keepdim=True), 0)


def weighted_sums(returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sum_i weights_i returns_i and sum_i weights_i over the group, (P, 1, T) each.

    returns (P, G, 1 or T), weights (P, G, T).
    """
    if returns.shape[-1] == 1:  # terminal rewards: one pass over the weights gives both sums
        both = returns.squeeze(-1).unsqueeze(1).expand(-1, 2, -1).clone()  # (P, 2, G)
        both[:, 1] = 1
        weighted, total = (both @ weights).split(1, dim=1)
        return weighted, total
    return (weights * returns).sum(1, keepdim=True), weights.sum(1, keepdim=True)


def refuse_tail(rollouts: RolloutGroups, tail: str) -> None:
    """Raises ValueError for an unknown tail, or for tail="carry" with returns per token."""
    refuse_unknown("tail", tail, ("zero", "own", "carry"))
    if tail == "carry":
        refuse_token_returns(rollouts, "tail='carry'")


def refuse_token_returns(rollouts: RolloutGroups, name: str) -> None:
    """Raises ValueError if rewards are given per token. name: the option that needs terminal rewards."""
    if rollouts.token_returns is not None:
        raise ValueError(
            f"{name} keeps a finished rollout's reward, so it needs terminal rewards; token_returns must be None."
        )


# ---- leave-one-out


def mean_of_others(rollouts: RolloutGroups, weights: Tensor | None = None, otherwise: Tensor | float = 0.0) -> Tensor:
    """Returns sum_{j != i} weights_j G_j / sum_{j != i} weights_j; `otherwise` where the others weigh nothing.

    weights (P, G, T) >= 0, 0 for rollouts that do not count; None = 1 for each scored rollout -> (P, G, T), or
    (P, G, 1) if nothing is per token. A rollout's own weights do not affect its value. Its own reward affects only
    rounding, because returns are counted from the smallest of the group.
    """
    if weights is None:
        weights = rollouts.scored.unsqueeze(-1).to(rollouts.rewards.dtype)
    lowest = lowest_return(rollouts)
    denominator = sum_of_others(weights)
    mean = lowest + sum_of_others(weights * (rollouts.returns - lowest)) / denominator
    return mean.where(denominator > 0, otherwise)


def sum_of_others(values: Tensor) -> Tensor:
    """Returns sum_{j != i} values_j over the group. (P, G, ...) -> the same shape.

    It adds the values before and after i: the total minus value i would cancel if one rollout had nearly all of it.
    """
    import torch

    none = torch.zeros_like(values[:, :1])
    before = torch.cat([none, values[:, :-1].cumsum(1)], dim=1)
    after = torch.cat([values[:, 1:].flip(1).cumsum(1).flip(1), none], dim=1)
    return before + after
