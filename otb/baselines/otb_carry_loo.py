"""Carry-forward OTB, leave-one-out: finished rollouts stay in the others' sums with their last energy and reward.

B_t^i = sum_{j != i} R^j W^j_min(t, T_j) / sum_{j != i} W^j_min(t, T_j), so each token has others to be compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import mean_of_others, refuse_token_returns

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, min_group_size=2, per_token=True, unbiased=True)
def otb_carry_loo(rollouts: RolloutGroups) -> Tensor:
    """Returns the others' energy-weighted mean reward at each token. score_norms (P, G, T) -> baseline (P, G, T).

    The only scored rollout of a group has baseline 0.

    Unbiased: B_t^i depends only on the other rollouts, which given the prompt are independent of rollout i, and the
    score of a token has mean 0 given its prefix.
    Cost: the same as `otb`. Choose it if groups are so small that `otb`'s lone tail or self-inclusion matters.
    """
    refuse_token_returns(rollouts, "otb_carry_loo")
    weights = rollouts.energy.where(rollouts.scored.unsqueeze(-1), 0.0)
    return mean_of_others(rollouts, weights, otherwise=mean_of_others(rollouts))
