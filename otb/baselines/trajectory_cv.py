"""Trajectory-wise control variate: a learned value of the prefix, and the luck of later tokens taken out of the return.

A_t = R - B_t - sum_{u>t} q_u: B_t a function of the prefix before token t, q_u a function of the prefix before token u
and of token u whose mean over token u is 0 (Cheng, Yan and Boots, arXiv 1908.03263). No baseline of the prefix can
touch the noise of what comes after token t; q can. Made of log pi and log sum pi^2 alone, like the proxy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.ridge_probe import OnlineRidge, ridge, sum_dtype
from otb.baselines.weighted_mean import mean_of_others

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups

UNLIKELY = 0.3  # a sampled token of lower probability counts as a surprise
LARGEST_SURPRISAL = 4.0  # nats, where its square would otherwise rule the sum


@declare(needs={"score_norms", "probabilities"}, per_token=True)
class TrajectoryCV(OnlineRidge):
    """Works with one rollout a group. Two ridge fits a step, on earlier steps only:

    U_t = clip(alpha . phi_t), an unweighted fit of the reward on the `trace` phi_t of the prefix: how surprising it has
    been so far, in what form, and how long. A policy that sampled what it holds unlikely has often gone wrong.
    q_u = (beta . [U_u, U_u^2, U_u S_u]) (pi_u - S_u), S = sum pi^2: a token likelier than usual, E[pi_u] = S_u, raises
    what is to be expected, by an amount that depends on how much there is to lose.
    B_t = theta . [phi_t, U_t, U_t^2, 1]; theta and beta are one fit of R with weights w_t, so that they minimise the
    token-diagonal variance E[sum_t w_t (R - B_t - sum_{u>t} q_u)^2].

    pseudo_rollouts: strength of the ridge, in rollouts. decay: share of the earlier sums that a step keeps.

    Unbiased: given the prefix before token u, E[pi_u - S_u] = 0, so E[q_u s_t] = E[E[q_u | prefix] s_t] = 0 for u > t,
    as s_t is settled by then; B_t as for any function of the prefix. q_t itself is left in: s_t depends on it.
    Before the first update the baseline is the mean reward of the group's other rollouts (0 with N = 1).
    Not quite so under importance sampling: there E[pi_u] = S_u holds for the policy, not for what drew the token.
    Cost: that of `otb`, one no-grad forward unless TRL makes one, and moments of 20 features per token. No hidden
    states. Choose it where `energy_probe` would be chosen; docs/variance.md has both measured.
    """

    def __call__(self, rollouts: RolloutGroups) -> Tensor:
        """B_t + sum_{u>t} q_u, (P, G, T); (P, G, 1) before the first update."""
        if not self.fitted:
            return mean_of_others(rollouts)
        features = self._features(rollouts)
        return (features @ self._kept("coefficients", features)).to(rollouts.rewards.dtype)

    def update(self, rollouts: RolloutGroups) -> None:
        if not rollouts.alive.any():
            return
        alive = rollouts.alive.unsqueeze(-1)
        rewards = rollouts.rewards[rollouts.scored]
        for name, extreme, wider in (("low", rewards.amin(), min), ("high", rewards.amax(), max)):
            self._state[name] = wider(self._state.get(name, extreme), extreme)
        phi = with_one(trace(rollouts)) * alive
        self._add("value", phi, alive.to(phi), rollouts)
        self._state["value_coefficients"] = self._fit("value")
        w = (rollouts.score_norms * rollouts.alive).unsqueeze(-1).to(phi)
        self._add("return", self._features(rollouts), w, rollouts)
        if self._state["return_moments"][-1, -1] > 0:
            self._state["coefficients"] = self._fit("return")

    def _add(self, name: str, features: Tensor, weights: Tensor, rollouts: RolloutGroups) -> None:
        """Adds sum w x x^T, sum w R x and the number of rollouts. features (P, G, T, D), weights (P, G, T, 1)."""
        weighted = (features * weights).flatten(0, 2)
        rewards = rollouts.returns.unsqueeze(-1).to(features)
        self._decay_and_add(
            **{
                f"{name}_moments": weighted.mT @ features.flatten(0, 2),
                f"{name}_target": (features * weights * rewards).sum((0, 1, 2)),
                f"{name}_rollouts": (rollouts.scored & (rollouts.lengths > 0)).sum().to(features),
            }
        )

    def _fit(self, name: str) -> Tensor:
        sums = (self._state[f"{name}_{part}"] for part in ("moments", "target", "rollouts"))
        return ridge(*sums, self.pseudo_rollouts)

    def _features(self, rollouts: RolloutGroups) -> Tensor:
        """[phi_t, U_t, U_t^2, sum_{u>t} (U_u, U_u^2, U_u S_u) (pi_u - S_u), 1], (P, G, T, D)."""
        import torch

        phi = trace(rollouts)
        value = with_one(phi) @ self._kept("value_coefficients", phi)
        value = value.clamp(self._kept("low", phi), self._kept("high", phi)).unsqueeze(-1)
        concentration = rollouts.log_sum_sq_probs.exp().to(phi).unsqueeze(-1)
        luck = (rollouts.log_probs.exp().to(phi).unsqueeze(-1) - concentration) * rollouts.own.unsqueeze(-1)
        luck = luck * torch.cat([value, value.square(), value * concentration], -1)
        later = luck.flip(2).cumsum(2).flip(2) - luck
        return with_one(torch.cat([phi, value, value.square(), later], -1))


def trace(rollouts: RolloutGroups) -> Tensor:
    """What the tokens before t and the distribution at t tell of the rollout. log_probs (P, G, T) -> (P, G, T, 14)."""
    import torch

    dtype = sum_dtype(rollouts.log_probs.device)
    surprisal, w = -rollouts.log_probs.to(dtype), rollouts.score_norms.to(dtype)
    concentration = rollouts.log_sum_sq_probs.to(dtype).exp()
    t = torch.arange(surprisal.shape[-1], dtype=dtype, device=surprisal.device).expand_as(surprisal)
    before = torch.stack([surprisal, w, surprisal.clamp(max=LARGEST_SURPRISAL).square()]).cumsum(-1)
    total, energy, squares = shifted(before)
    surprises = shifted((rollouts.log_probs.exp() < UNLIKELY).to(dtype).cumsum(-1))
    luck = shifted((rollouts.log_probs.to(dtype).exp() - concentration).cumsum(-1))
    last = shifted(surprisal)
    return torch.stack(
        [total, total.sqrt(), total.log1p(), energy, energy.log1p(), squares, surprises, 1 / (1 + surprises), luck]
        + [last, shifted(last), shifted(surprisal.cummax(-1).values), t.sqrt(), concentration],
        dim=-1,
    )


def shifted(values: Tensor) -> Tensor:
    """values_{t-1} at t, 0 at the first token."""
    import torch

    return torch.nn.functional.pad(values, (1, 0))[..., :-1]


def with_one(features: Tensor) -> Tensor:
    import torch

    return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
