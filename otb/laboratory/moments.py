"""Computes unbiased moments of an estimator's group gradient.

g is the gradient of one prompt group: the mean over its rollouts of sum_t A_t s_t. mu = E[R sum_t s_t] is the true
gradient of the prompt. Signal, overlap and truth are U-statistics: they multiply only gradients that share no rollout.
A plug-in estimate such as ||mean of g||^2 would count noise as signal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moments(rollout_gradients: Tensor, reference: Tensor, members: Tensor) -> dict[str, float]:
    """Returns the moments of one prompt and one estimator at one group size.

    rollout_gradients (K, M, D): sum_t A_t s_t of each of the M rollouts in each of K partitions into groups. members
    (K, n, N) int: the rollouts of the n >= 2 groups of each partition. reference (M, D): independent gradients of the
    rollouts, with mean mu.
    -> power E||g||^2, signal ||E g||^2, overlap <E g, mu>, truth ||mu||^2.
    """
    partitions, groups, size = members.shape
    index = members.flatten(1).unsqueeze(-1).expand(-1, -1, rollout_gradients.shape[-1])
    g = rollout_gradients.gather(1, index).unflatten(1, (groups, size)).mean(2)  # (K, n, D)
    squares, total = g.square().sum(-1), g.sum(1)
    count = len(reference)
    others = reference.sum(0) - reference[members].sum(2)  # (K, n, D): sum over rollouts outside the group
    return {
        "power": squares.mean().item(),
        "signal": ((total.square().sum(-1) - squares.sum(1)) / (groups * (groups - 1))).mean().item(),
        "overlap": ((g * others).sum(-1) / (count - size)).mean().item(),
        "truth": truth(reference),
    }


def truth(reference: Tensor) -> float:
    """Returns ||mu||^2, estimated from independent gradients (M, D) with mean mu."""
    count = len(reference)
    return ((reference.sum(0).square().sum() - reference.square().sum()) / (count * (count - 1))).item()


def partitions(rollouts: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns random partitions of the rollouts into n = rollouts // size groups, (count, n, size) int."""
    groups = rollouts // size
    if groups < 2:
        raise ValueError(f"{rollouts} rollouts make fewer than two groups of {size}. Try samples={2 * size}.")
    draws = [torch.randperm(rollouts, generator=generator)[: groups * size] for _ in range(count)]
    return torch.stack(draws).unflatten(1, (groups, size))
