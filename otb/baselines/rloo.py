"""Leave-one-out baseline: each rollout is compared with the other rollouts of its group (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import lowest_reward

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(min_group_size=2, unbiased=True)
def rloo(rollouts: RolloutGroups) -> Tensor:
    """Returns the mean reward of the other scored rollouts. rewards (P, G) -> baseline (P, G, 1).

    The only scored rollout of a group has no others: its baseline is 0.
    """
    lowest = lowest_reward(rollouts)  # (P, 1)
    rewards = (rollouts.rewards - lowest).nan_to_num()  # an unscored rollout counts for nothing
    total = rewards.sum(dim=1, keepdim=True)  # (P, 1)
    others = rollouts.scored.sum(dim=1, keepdim=True) - rollouts.scored.int()  # (P, G)
    mean = lowest + (total - rewards) / others.clamp(min=1)
    return (mean * (others > 0)).unsqueeze(-1)
