"""Group mean baseline (Dr. GRPO, arXiv 2503.20783): each rollout is compared with the mean of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import mean_reward

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(min_group_size=2, unbiased=False)
def group_mean(rollouts: RolloutGroups) -> Tensor:
    """Returns the mean reward of the scored rollouts. rewards (P, G) -> baseline (P, 1, 1)."""
    return mean_reward(rollouts).unsqueeze(-1)
