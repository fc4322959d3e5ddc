"""Sequence-level energy baseline, leave-one-out: the others' rewards are weighted by their whole energy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import mean_of_others

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, min_group_size=2, unbiased=True)
def sequence_energy_loo(rollouts: RolloutGroups) -> Tensor:
    """Returns sum_{j != i} R^j W_T^j / sum_{j != i} W_T^j over scored rollouts. rewards (P, G) -> baseline (P, G, 1).

    Unbiased: it depends only on the other rollouts, which given the prompt are independent of rollout i. The only
    scored rollout of a group has baseline 0.
    Cost: the same as `sequence_energy`. Choose it to avoid self-inclusion if a loss or mask reads one advantage per
    rollout.
    """
    weights = rollouts.required("score_norms").sum(-1, keepdim=True) * rollouts.scored.unsqueeze(-1)  # (P, G, 1)
    return mean_of_others(rollouts, weights, otherwise=mean_of_others(rollouts))
