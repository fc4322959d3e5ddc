"""GRPO (arXiv 2402.03300): a rollout is compared with its group's mean, in units of the group's standard deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import Baseline, declare
from otb.baselines.weighted_mean import mean_reward

if TYPE_CHECKING:
    from otb.rollouts import RolloutGroups


@declare(min_group_size=2, unbiased=False)
def grpo(rollouts: RolloutGroups, eps: float = 1e-4) -> Baseline:
    """Returns mean and standard deviation of a group's scored rewards. rewards (P, G) -> value, scale (P, 1, 1).

    The deviation is the sample's (n - 1); eps = 1e-4 is TRL's. A group with one scored rollout has deviation 0.
    """
    count = rollouts.scored.sum(dim=1, keepdim=True)  # (P, 1)
    mean = mean_reward(rollouts)  # (P, 1)
    squares = (rollouts.rewards - mean).square().nansum(dim=1, keepdim=True)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return Baseline(mean.unsqueeze(-1), (std + eps).unsqueeze(-1))
