"""Energy probe: a linear value of the prefix that minimises the token-diagonal variance of earlier steps.

V_t = clip(theta . [h_t; 1]), where theta is the w-weighted ridge fit of `ridge_probe`. It needs one small solve a step
and no optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.ridge_probe import RidgeProbe, features, ridge, sum_dtype
from otb.baselines.weighted_mean import sum_of_others

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates

STRENGTHS = (float("inf"), 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)  # k of the group correction; inf = none


@declare(needs={"hidden_states", "score_norms"}, per_token=True, unbiased=True)
class EnergyProbe(RidgeProbe):
    """A baseline B_t = V_t, or V_t (1 + a_-i) with `group_correction`, that works with one rollout a group.

    pseudo_rollouts: strength of the ridge, in rollouts. decay: share of the earlier sums that a step keeps.
    group_correction: corrects for differences between prompts that a linear probe misses but the group's other rollouts
        show. a_-i = sum_{j != i} U_j (R_j - U_j) / (sum_{j != i} U_j^2 + k mean U^2) is an empirical Bayes estimate of
        the share by which the group's rewards exceed their expectation. U_j is an unweighted ridge on rollout j's last
        state before its end. Values and rewards are counted from the lowest reward seen. k is the value on the grid
        that had the smallest energy-weighted squared error on earlier steps, each predicted before it was fitted.
        With k = infinity, which is on the grid, the correction switches itself off if prompts do not differ.

    Unbiased: V_t depends only on the prefix before token t and on earlier steps, a_-i only on the other rollouts and on
    earlier steps. Given both, E[B_t s_t] = B_t E[s_t] = 0. V_t is clipped to the range of earlier steps' rewards.
    Before the first update the baseline is the mean reward of the group's other rollouts (0 with N = 1), which is
    unbiased too.
    Cost: one no-grad forward a step (even if TRL makes one itself), tokens x d^2 for the moments, one solve of size
    d + 1. It is the first choice among unbiased baselines for small groups, for N = 1 and for long responses.
    """

    def __init__(self, pseudo_rollouts: float = 100.0, decay: float = 0.9, group_correction: bool = False):
        super().__init__(pseudo_rollouts, decay)
        if not isinstance(group_correction, bool):
            raise ValueError(f"group_correction={group_correction} must be true or false. Try group_correction=true.")
        self.group_correction = group_correction

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns rows and totals of `RidgeProbe`; group_correction adds the row last_state (B, d + 1).

        last_state is phi of the last own token.
        """
        rows, totals = super().reduce(tokens)
        if self.group_correction:
            phi = features(tokens)
            rows["last_state"] = (tokens.last.to(phi).unsqueeze(1) @ phi).squeeze(1)  # (B, d + 1)
        return rows, totals

    def __call__(self, rollouts: RolloutGroups) -> Tensor:
        """Returns B_t (P, G, T); (P, G, 1) before the first update."""
        values = self.values(rollouts)
        if not (self.group_correction and self.fitted):
            return values
        low, high = (self._kept(name, values) for name in ("low", "high"))
        share = self._shares(rollouts, [float(self._state["strength"])])[0].unsqueeze(-1).to(values)
        return (low + (values - low) * (1 + share)).clamp(low, high)

    def update(self, rollouts: RolloutGroups) -> None:
        if self.group_correction and rollouts.scored.any():
            self._update_correction(rollouts)
        super().update(rollouts)
        if self.group_correction and self.fitted and self._state["last_moments"][-1, -1] > 0:
            self._fit_correction()

    # ---- the group correction

    def _shares(self, rollouts: RolloutGroups, strengths: list[float]) -> Tensor:
        """Returns a_-i for each k of `strengths`. -> (len(strengths), P, G)."""
        import torch

        states = rollouts.reduced["last_state"]
        low = self._kept("low", states)
        counted = (rollouts.scored & (rollouts.lengths > 0)).to(states)
        expected = (states @ self._kept("last_coefficients", states) - low) * counted  # U_j, (P, G)
        excess = (rollouts.rewards.nan_to_num().to(states) - low) * counted - expected
        above, below = sum_of_others(expected * excess), sum_of_others(expected.square())
        k = torch.tensor(strengths, dtype=states.dtype, device=states.device).view(-1, 1, 1)
        return above / (below + k * self._kept("mean_square", states))

    def _update_correction(self, rollouts: RolloutGroups) -> None:
        """Adds the sums of this step's last states, and its squared errors per k under the state before it."""
        states = rollouts.reduced["last_state"]
        if self.fitted:
            w = (rollouts.required("score_norms") * rollouts.alive).to(states)
            low, rewards = self._kept("low", states), rollouts.rewards.nan_to_num().to(states)
            share = self._shares(rollouts, list(STRENGTHS)).unsqueeze(-1)
            values = low + (rollouts.reduced["values"].to(states) - low) * (1 + share)  # (K, P, G, T)
            values = values.clamp(low, self._kept("high", states))
            self._decay_and_add(losses=(w * (rewards.unsqueeze(-1) - values).square()).sum((1, 2, 3)))
        counted = rollouts.scored & (rollouts.lengths > 0)
        last = states[counted].to(sum_dtype(states.device))
        self._decay_and_add(
            last_moments=last.mT @ last,
            last_target=rollouts.rewards[counted].to(last) @ last,
        )

    def _fit_correction(self) -> None:
        """Solves for U, and selects the strength that has predicted best so far."""
        moments, target = self._state["last_moments"], self._state["last_target"]
        fit = ridge(moments, target, moments[-1, -1], self.pseudo_rollouts)
        above = fit.clone()
        above[-1] -= self._kept("low", fit)
        mean_square = (above @ moments @ above / moments[-1, -1]).clamp(min=1e-12)
        self._state |= {"last_coefficients": fit, "mean_square": mean_square}
        best = STRENGTHS[int(self._state["losses"].argmin())] if "losses" in self._state else STRENGTHS[0]
        self._state["strength"] = mean_square.new_tensor(best)
