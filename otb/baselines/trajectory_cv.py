"""Trajectory-wise control variate: subtracts a value of the prefix and the luck of later tokens from the return.

A_t = R - B_t - sum_{u>t} q_u. B_t depends on the prefix before token t. q_u depends on token u and the prefix before
it, and has mean 0 over token u (Cheng, Yan and Boots, arXiv 1908.03263). A baseline of the prefix cannot reduce the
noise of tokens after t; q can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.ridge_probe import OnlineRidge, features, sum_dtype
from otb.baselines.weighted_mean import mean_of_others

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates

UNLIKELY = 0.3  # a sampled token of lower probability counts as a surprise
LARGEST_SURPRISAL = 4.0  # nats; the square of a larger one would dominate the sum


@declare(needs={"score_norms", "hidden_states"}, per_token=True, unbiased=True)
class TrajectoryCV(OnlineRidge):
    """A baseline of two ridge fits on earlier steps, which works with one rollout a group.

    U_t = clip(alpha . phi_t) is an unweighted fit of the reward. phi_t = [h_t; trace_t; 1] holds the final hidden state
    that predicts token t, and how surprising the prefix has been so far (`trace`). A policy that has sampled unlikely
    tokens has often gone wrong, and its hidden state may not show it.
    q_u = (beta . [U_u, U_u^2, U_u S_u]) (pi_u - S_u), S = sum pi^2. Since E[pi_u] = S_u, a token that is likelier than
    average raises the expected reward, by an amount that depends on how much there is to lose.
    B_t = theta . [phi_t, U_t, U_t^2]. One fit of R with weights w_t gives theta and beta, so together they minimise the
    token-diagonal variance E[sum_t w_t (R - B_t - sum_{u>t} q_u)^2].

    pseudo_rollouts: strength of the ridge, in rollouts. decay: share of the earlier sums that a step keeps.

    Unbiased: given the prefix before token u, E[pi_u - S_u] = 0. For u > t the prefix determines s_t, so E[q_u s_t] =
    E[E[q_u | prefix] s_t] = 0. B_t is a function of the prefix. q_t is not subtracted, because s_t depends on token t.
    The first step fits U, the second B and q; until then the baseline is the mean reward of the group's other rollouts
    (0 with N = 1).
    Cost: the same as `energy_probe` plus a second matrix of moments. Choose it if single tokens decide rollouts: it has
    7 to 13 % less noise than `energy_probe` on some policies, and no less on others (docs/variance.md).
    """

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns rows and totals.

        Rows: values (B, T); states and weighted_features, summed over t. Totals: their moments.
        """
        phi, score_norms = self._states(tokens), tokens.required("score_norms")
        counted = tokens.alive.unsqueeze(-1).to(phi)
        rows = {"states": (counted * phi).sum(1)}
        totals = {"state_moments": (counted * phi).flatten(0, 1).mT @ phi.flatten(0, 1)}
        if "value_coefficients" in self._state:
            x = self._features(phi, tokens)
            w = score_norms.unsqueeze(-1).to(phi) * counted
            rows["weighted_features"] = (w * x).sum(1)
            totals["moments"] = (w * x).flatten(0, 1).mT @ x.flatten(0, 1)
            if self.fitted:
                rows["values"] = (x @ self._kept("coefficients", x)).to(score_norms.dtype)
        return rows, totals

    def __call__(self, rollouts: RolloutGroups) -> Tensor:
        """Returns B_t + sum_{u>t} q_u, (P, G, T); (P, G, 1) on the first two steps."""
        return rollouts.reduced["values"] if self.fitted else mean_of_others(rollouts)

    def update(self, rollouts: RolloutGroups) -> None:
        """Adds a step to the sums and refits; does nothing if no rollout was scored."""
        rewards = rollouts.rewards[rollouts.scored]
        if not rewards.numel():
            return
        self._widen_range(rewards)
        if "moments" in rollouts.totals:
            self._fit("coefficients", "moments", "weighted_features", rollouts)
        self._fit("value_coefficients", "state_moments", "states", rollouts)

    def _fit(self, coefficients: str, moments: str, rows: str, rollouts: RolloutGroups) -> None:
        """Adds a step's sums to the earlier sums, and solves for the coefficients."""
        new = rollouts.totals[moments].to(sum_dtype(rollouts.rewards.device))
        target = rollouts.rewards[rollouts.scored].to(new) @ rollouts.reduced[rows][rollouts.scored].to(new)
        counted = (rollouts.lengths[rollouts.scored] > 0).sum().to(new)
        names = (moments, f"{moments}_target", f"{moments}_rollouts")
        self._decay_and_add(**dict(zip(names, (new, target, counted), strict=True)))
        if self._state[moments][-1, -1] > 0:
            self._state[coefficients] = self._solved(*names)

    def _states(self, tokens: TokenStates) -> Tensor:
        """Returns phi (B, T, d + 15), all 0 past the last own token; its last entry is 1."""
        import torch

        hidden = features(tokens)
        return torch.cat([trace(tokens).to(hidden) * tokens.own.unsqueeze(-1), hidden], dim=-1)

    def _features(self, phi: Tensor, tokens: TokenStates) -> Tensor:
        """Returns [U_t, U_t^2, sum_{u>t} (U_u, U_u^2, U_u S_u) (pi_u - S_u), phi_t], (B, T, D); the last entry is 1."""
        import torch

        value = (phi @ self._kept("value_coefficients", phi)).clamp(self._kept("low", phi), self._kept("high", phi))
        value = (value * tokens.own).unsqueeze(-1)
        concentration = tokens.log_sum_sq_probs.to(phi).exp().unsqueeze(-1)
        luck = (tokens.log_probs.to(phi).exp().unsqueeze(-1) - concentration) * tokens.own.unsqueeze(-1)
        luck = luck * torch.cat([value, value.square(), value * concentration], -1)
        later = luck.flip(1).cumsum(1).flip(1) - luck
        return torch.cat([value, value.square(), later, phi], -1)


def trace(tokens: TokenStates) -> Tensor:
    """Returns (B, T, 14) features of the tokens before t and of the distribution at t."""
    import torch

    dtype = sum_dtype(tokens.log_probs.device)
    surprisal, w = -tokens.log_probs.to(dtype), tokens.required("score_norms").to(dtype)
    concentration = tokens.log_sum_sq_probs.to(dtype).exp()
    t = torch.arange(surprisal.shape[-1], dtype=dtype, device=surprisal.device).expand_as(surprisal)
    before = torch.stack([surprisal, w, surprisal.clamp(max=LARGEST_SURPRISAL).square()]).cumsum(-1)
    total, energy, squares = shifted(before)
    surprises = shifted((tokens.log_probs.exp() < UNLIKELY).to(dtype).cumsum(-1))
    luck = shifted((tokens.log_probs.to(dtype).exp() - concentration).cumsum(-1))
    last = shifted(surprisal)
    return torch.stack(
        [total, total.sqrt(), total.log1p(), energy, energy.log1p(), squares, surprises, 1 / (1 + surprises), luck]
        + [last, shifted(last), shifted(surprisal.cummax(-1).values), t.sqrt(), concentration],
        dim=-1,
    )


def shifted(values: Tensor) -> Tensor:
    """Returns values_{t-1} at t, 0 at the first token. (..., T) -> (..., T)."""
    import torch

    return torch.nn.functional.pad(values, (1, 0))[..., :-1]
