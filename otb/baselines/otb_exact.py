"""OTB with exact norms: the squared norm of the prefix's score over all parameters replaces W_t.

B_t = sum_i G_t^i E_t^i / sum_i E_t^i with E_t = ||sum_{j<=t} s_j||^2. Realized energy W_t adds squared norms of single
tokens in logit space; E_t also includes the cross terms between tokens and the network's Jacobian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from otb.baselines import declare
from otb.baselines.weighted_mean import refuse_tail, weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"prefix_norms"}, per_token=True, unbiased=False)
def otb_exact(rollouts: RolloutGroups, tail: Literal["zero", "own", "carry"] = "zero", eps: float = 1e-8) -> Tensor:
    """Returns the mean of the group's returns, weighted by exact norms. prefix_norms (P, G, T) -> baseline (P, 1, T).

    tail: as in `otb`. With one rollout a group the baseline is 0.

    Biased for the same reason as `otb`: rollout i counts in its own baseline with weight omega_t = E_t^i / sum_j E_t^j,
    so A = (1 - omega_t) (R - mean of the others), and omega_t depends on the token whose score it multiplies. The bias
    vanishes as the group grows.
    Cost: one forward per rollout and one backward per own token, which limits it to short responses and to a small
    policy or LoRA. Choose it to see what the proxy loses: the proxy ranks tokens well, but saturates if a few tokens
    carry most of the norm.
    """
    refuse_tail(rollouts, tail)
    if rollouts.group_size == 1:
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, rollouts.tokens)
    counted = rollouts.scored.unsqueeze(-1) if tail == "carry" else rollouts.alive  # (P, G, 1 or T)
    baseline = weighted_mean(rollouts, rollouts.required("prefix_norms").where(counted, 0.0), eps)
    return baseline.masked_fill(rollouts.lone, 0) if tail == "zero" else baseline
