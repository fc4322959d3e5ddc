"""Optimal Token Baseline (arXiv 2602.07078): at token t, rewards weighted by the energy realized up to t.

B_t = sum_i G_t^i W_t^i / sum_i W_t^i over the rollouts that reach their t-th own token minimises E[W_t (G_t - B_t)^2].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from otb.baselines import declare
from otb.baselines.weighted_mean import token_weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, per_token=True, unbiased=False)
def otb(rollouts: RolloutGroups, tail: Literal["zero", "own", "carry"] = "zero", eps: float = 1e-8) -> Tensor:
    """score_norms (P, G, T) -> baseline (P, 1, T). With one rollout a group there is no baseline: 0.

    tail: what happens where one rollout of the group outlives all others.
        "zero":  baseline 0, so the advantage is the return (the reference implementation's default).
        "own":   the formula as it stands: its own return, so the advantage is 0.
        "carry": finished rollouts keep their last W and R in the sums, so there is no lone tail.
    """
    return token_weighted_mean(rollouts, rollouts.energy, tail, eps)
