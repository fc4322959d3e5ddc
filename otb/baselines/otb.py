"""Optimal Token Baseline (arXiv 2602.07078): at token t, rewards are weighted by the energy realized up to t.

B_t = sum_i W_t^i G_t^i / sum_i W_t^i over the rollouts that reach their t-th own token. With G the return and W_t =
sum_{j<=t} w_j the realized energy, it minimises E[W_t (G_t - B_t)^2]. The advantage of own token t is G_t - B_t.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from otb.baselines import declare
from otb.baselines.weighted_mean import lowest_return, refuse_tail, weighted_sums

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, per_token=True, unbiased=False)
def otb(rollouts: RolloutGroups, tail: Literal["zero", "own", "carry"] = "zero", eps: float = 1e-8) -> Tensor:
    """Returns the group's mean return at each token, weighted by energy. score_norms (P, G, T) -> baseline (P, 1, T).

    tail: what happens at tokens that only one rollout of the group reaches.
        "zero":  The baseline is 0, so the advantage is the return (the reference implementation's default).
        "own":   The formula applies unchanged: the baseline is the rollout's own return, so the advantage is 0.
        "carry": Finished rollouts keep their last W and R in the sums, so there is no lone tail.
    With one rollout a group the baseline is 0.

    Biased: rollout i counts in its own baseline with weight omega_t = W_t^i / sum_j W_t^j. Its advantage is therefore
    (1 - omega_t) (G_t - mean of the others), and omega_t depends on the tokens whose score it multiplies.
    """
    refuse_tail(rollouts, tail)
    if rollouts.group_size == 1:
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, rollouts.tokens)
    counted = rollouts.scored.unsqueeze(-1) if tail == "carry" else rollouts.alive  # (P, G, 1 or T)
    energy = rollouts.energy.where(counted, 0.0)  # W_t^i, (P, G, T)
    lowest = lowest_return(rollouts)  # m, (P, 1, 1 or T): counting from m, eps pulls no baseline out of range
    weighted, total = weighted_sums(rollouts.returns - lowest, energy)  # sum_i W (G - m), sum_i W: (P, 1, T)
    baseline = lowest + weighted / (total + eps)
    return baseline.masked_fill(rollouts.lone, 0) if tail == "zero" else baseline
