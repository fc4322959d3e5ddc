"""Group mean baseline (Dr. GRPO, arXiv 2503.20783): each rollout is compared with the mean of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import lowest_reward

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(min_group_size=2, unbiased=False)
def group_mean(rollouts: RolloutGroups) -> Tensor:
    """Returns the mean reward of the scored rollouts. rewards (P, G) -> baseline (P, 1, 1)."""
    lowest = lowest_reward(rollouts)  # (P, 1)
    above = (rollouts.rewards - lowest).nanmean(dim=1, keepdim=True)  # NaN only where the whole group is unscored
    return (lowest + above.nan_to_num()).unsqueeze(-1)
