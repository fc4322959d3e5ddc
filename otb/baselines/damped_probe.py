"""Damped probe: the energy probe's advantage is multiplied by the other rollouts' share of the group's energy.

A_t = (1 - omega_t) (R - V_t), omega_t = W_t^i / sum_j W_t^j, where finished rollouts keep their last W. The advantage
of `otb` with carried energy is (1 - omega_t) (R - mean of the others); V_t replaces that mean here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import Baseline, declare
from otb.baselines.ridge_probe import RidgeProbe
from otb.baselines.weighted_mean import sum_of_others

if TYPE_CHECKING:
    from otb.rollouts import RolloutGroups


@declare(needs={"hidden_states", "score_norms"}, min_group_size=2, per_token=True, unbiased=False)
class DampedProbe(RidgeProbe):
    """A baseline of value V_t (P, G, T or 1) and scale 1 / (1 - omega_t) (P, G, T). Arguments as in `EnergyProbe`.

    Biased: omega_t depends on the tokens whose score it multiplies, so E[omega_t (R - V_t) s_t] is not 0. Rollouts with
    much energy count less, which changes the direction of the gradient as well as its length. omega_t is 1 / N on
    average, and the bias vanishes as the group grows. The only scored rollout of a group has omega = 1, advantage 0.
    Cost: the same as the energy probe. Choose it to see what damping alone is worth: compare it with `energy_probe`,
    just as `otb` is compared with `otb_carry_loo`.
    """

    def __call__(self, rollouts: RolloutGroups) -> Baseline:
        energy = rollouts.energy.where(rollouts.scored.unsqueeze(-1), 0.0)
        others = sum_of_others(energy)
        scale = (energy + others) / others  # infinite where the others weigh nothing: advantage 0
        return Baseline(self.values(rollouts), scale.where(energy + others > 0, 1.0))
