"""OPO (arXiv 2505.23585): rewards are weighted by length, which would be optimal if energy grew with length alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import lowest_reward

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(min_group_size=2, unbiased=False)
def opo(rollouts: RolloutGroups) -> Tensor:
    """Returns sum(length R) / sum(length) over the scored rollouts. rewards, lengths (P, G) -> baseline (P, 1, 1).

    It is 0 if no scored rollout of the group has an own token.
    """
    weights = rollouts.lengths * rollouts.scored
    total = weights.sum(dim=1, keepdim=True)  # (P, 1)
    lowest = lowest_reward(rollouts)  # (P, 1)
    weighted = (weights * (rollouts.rewards - lowest).nan_to_num()).sum(dim=1, keepdim=True)
    mean = lowest + weighted / total.clamp(min=1)
    return (mean * (total > 0)).unsqueeze(-1)
