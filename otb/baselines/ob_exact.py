"""Sequence-level optimal baseline with exact norms: rewards are weighted by each rollout's squared score norm.

B = sum_i E^i R^i / sum_i E^i with E = ||sum_t s_t||^2 minimises E[E (R - B)^2], the variance of the gradient of a
rollout whose baseline is one number (Weaver and Tao 2001; Greensmith, Bartlett and Baxter 2004).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.weighted_mean import weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(needs={"sequence_norms"}, min_group_size=2, unbiased=False)
def ob_exact(rollouts: RolloutGroups, eps: float = 1e-8) -> Tensor:
    """Returns sum(R E) / sum(E) over the scored rollouts. sequence_norms (P, G), rewards (P, G) -> baseline (P, 1, 1).

    Biased: rollout i counts in its own baseline with weight omega = E^i / sum_j E^j. Its advantage is therefore
    (1 - omega) (R^i - mean of the others), and omega depends on the rollout. The bias vanishes as the group grows.
    Cost: one forward and one backward per rollout. This is more than a second training pass, as they run one by one.
    Choose it as the yardstick for `sequence_energy`, which uses the proxy instead of E.
    """
    weights = rollouts.required("sequence_norms").unsqueeze(-1) * rollouts.scored.unsqueeze(-1)  # (P, G, 1)
    return weighted_mean(rollouts, weights, eps)
