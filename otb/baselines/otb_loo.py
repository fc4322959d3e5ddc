"""OTB, leave-one-out: at token t, the other rollouts that reach it are weighted by their energy so far.

B_t^i = sum_{j != i} W_t^j G_t^j / sum_{j != i} W_t^j over the others that have a t-th own token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from otb.baselines import declare
from otb.baselines.weighted_mean import mean_of_others, refuse_token_returns, sum_of_others
from otb.values import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"score_norms"}, min_group_size=2, per_token=True, unbiased=True)
def otb_loo(rollouts: RolloutGroups, tail: Literal["carry", "zero"] = "carry") -> Tensor:
    """Returns the others' energy-weighted mean return at each token. score_norms (P, G, T) -> baseline (P, G, T).

    tail: what rollout i is compared with at a token that no other rollout reaches.
        "carry": The others at their end, sum_{j != i} R^j W_T^j / sum_{j != i} W_T^j, as in `otb_carry_loo`.
        "zero":  Nothing; the baseline is 0. This is the leave-one-out form of the reference's rule for `otb`.

    Unbiased, with either tail. Rollouts of a prompt are independent, and W_t^j, R^j and whether j reaches t depend on
    rollout j alone. So B_t^i is independent of rollout i, and E[B_t^i s_t^i] = E[B_t^i] E[s_t^i] = 0, as the score has
    mean 0. The lengths of the others alone decide which rule applies at t, so either tail keeps this. (An advantage of
    0 in the tail would be biased: it would drop late tokens with the probability that the others have finished.)
    Cost: the same as `otb`. Choose it to see what is left of `otb` without self-inclusion, which damps every advantage.
    """
    refuse_unknown("tail", tail, ("carry", "zero"))
    plain = mean_of_others(rollouts)  # used if the others weigh nothing
    if tail == "carry":
        refuse_token_returns(rollouts, "tail='carry'")
        beyond = mean_of_others(rollouts, rollouts.energy.where(rollouts.scored.unsqueeze(-1), 0.0), plain)
    else:
        beyond = plain.where(sum_of_others(rollouts.alive.int()) > 0, 0.0)
    return mean_of_others(rollouts, rollouts.energy.where(rollouts.alive, 0.0), beyond)
