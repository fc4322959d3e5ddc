"""Optimal Token Baseline (arXiv 2602.07078): at token t, rewards weighted by the energy realized up to t.

B_t = sum_i G_t^i W_t^i / sum_i W_t^i over the rollouts that reach their t-th own token minimises E[W_t (G_t - B_t)^2].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from otb.baselines import declare
from otb.baselines.weighted_mean import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, per_token=True)
def otb(rollouts: RolloutGroups, tail: Literal["zero", "own", "carry"] = "zero", eps: float = 1e-8) -> Tensor:
    """score_norms (P, G, T) -> baseline (P, 1, T). With one rollout a group there is no baseline: 0.

    tail: what happens where one rollout of the group outlives all others.
        "zero":  baseline 0, so the advantage is the return (the reference implementation's default).
        "own":   the formula as it stands: its own return, so the advantage is 0.
        "carry": finished rollouts keep their last W and R in the sums, so there is no lone tail.
    """
    if tail not in ("zero", "own", "carry"):
        raise ValueError(f"tail={tail!r} is not one of zero, own, carry.")
    if tail == "carry" and rollouts.token_returns is not None:
        raise ValueError(
            "tail='carry' keeps a finished rollout's reward; it needs terminal rewards, not token_returns."
        )
    if rollouts.group_size == 1:
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, rollouts.tokens)
    counted = rollouts.scored.unsqueeze(-1) if tail == "carry" else rollouts.alive
    baseline = weighted_mean(rollouts, rollouts.energy.where(counted, 0.0), eps)
    if tail == "zero":
        baseline = baseline.masked_fill(rollouts.lone, 0)
    return baseline
