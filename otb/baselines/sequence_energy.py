"""Sequence-level optimal baseline with the proxy: rewards are weighted by each rollout's whole realized energy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, min_group_size=2, unbiased=False)
def sequence_energy(rollouts: RolloutGroups, eps: float = 1e-8) -> Tensor:
    """Returns sum(R W_T) / sum(W_T) over the scored rollouts. rewards (P, G) -> baseline (P, 1, 1).

    Biased: rollout i counts in its own baseline with weight W_T^i / sum_j W_T^j, which depends on its tokens.
    """
    weights = rollouts.required("score_norms").sum(-1, keepdim=True) * rollouts.scored.unsqueeze(-1)  # (P, G, 1)
    return weighted_mean(rollouts, weights, eps)
