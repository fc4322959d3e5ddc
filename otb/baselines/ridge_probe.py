"""Fits a linear value of the prefix online, by energy-weighted ridge regression; the probe baselines share it.

phi_t = [h_t; 1], where h_t is the final hidden state that predicts own token t. For V_t = theta . phi_t the
token-diagonal part of the gradient's variance is E[sum_t w_t (R - V_t)^2]. Its minimum is a weighted least squares fit:
theta <- argmin sum w_t (R - theta . phi_t)^2 + ridge. It needs only sum_t w_t phi_t of each rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines.weighted_mean import mean_of_others

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates


class OnlineRidge:
    """Keeps the sums of ridge fits, which decay by `decay` a step; the ridge counts as `pseudo_rollouts` rollouts."""

    def __init__(self, pseudo_rollouts: float = 100.0, decay: float = 0.9):
        if not pseudo_rollouts > 0:
            raise ValueError(
                f"pseudo_rollouts={pseudo_rollouts} must be above 0: without a ridge, there is no unique fit to fewer "
                "rollouts than dimensions. Try pseudo_rollouts=100."
            )
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}, the share of earlier sums kept, must be in [0, 1]. Try decay=0.9.")
        self.pseudo_rollouts, self.decay = pseudo_rollouts, decay
        self._state: dict[str, Tensor] = {}  # replaced, never changed in place

    @property
    def fitted(self) -> bool:
        """Whether an earlier step has left coefficients."""
        return "coefficients" in self._state

    def _widen_range(self, rewards: Tensor) -> None:
        """Keeps the range of the rewards seen so far, as `low` and `high` of the state."""
        for name, extreme, wider in (("low", rewards.amin(), min), ("high", rewards.amax(), max)):
            self._state[name] = wider(self._state.get(name, extreme), extreme)

    def _decay_and_add(self, **sums: Tensor) -> None:
        """Adds a step's sums to the decayed ones of earlier steps."""
        for name, new in sums.items():
            self._state[name] = self.decay * self._kept(name, new) + new if name in self._state else new

    def _solved(self, moments: str, target: str, rollouts: str) -> Tensor:
        """Solves the ridge regression from these sums in the state."""
        return ridge(self._state[moments], self._state[target], self._state[rollouts], self.pseudo_rollouts)

    def _kept(self, name: str, like: Tensor) -> Tensor:
        """Returns a tensor of the state with the dtype and device of `like`: after a resume the state is on the CPU."""
        return self._state[name].to(like)

    def state_dict(self) -> dict:
        return dict(self._state)

    def load_state_dict(self, state: dict) -> None:
        self._state = dict(state)


class RidgeProbe(OnlineRidge):
    """An OnlineRidge that predicts the reward from phi with weights w, as the module docstring describes."""

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns rows and totals.

        Rows: values (B, T) under the state so far, weighted_states (B, d + 1). Totals: moments (d + 1, d + 1).
        """
        phi, score_norms = features(tokens), tokens.required("score_norms")
        w = (score_norms * tokens.alive).to(phi.dtype).unsqueeze(-1)  # (B, T, 1)
        values = self._predicted(phi) if self.fitted else score_norms.new_zeros(tokens.own.shape)
        rows = {"values": values.to(score_norms.dtype), "weighted_states": (w.mT @ phi).squeeze(1)}
        return rows, {"moments": (w * phi).flatten(0, 1).mT @ phi.flatten(0, 1)}

    def values(self, rollouts: RolloutGroups) -> Tensor:
        """Returns V_t (P, G, T), fitted on earlier steps; before the first update the mean of the others (P, G, 1)."""
        return rollouts.reduced["values"] if self.fitted else mean_of_others(rollouts)

    def update(self, rollouts: RolloutGroups) -> None:
        """Adds a step to the sums and refits theta; does nothing if no rollout was scored."""
        moments = rollouts.totals["moments"].to(sum_dtype(rollouts.rewards.device))
        rewards = rollouts.rewards[rollouts.scored]
        if not rewards.numel():
            return
        states = rollouts.reduced["weighted_states"][rollouts.scored].to(moments)
        self._decay_and_add(
            moments=moments,
            target=rewards.to(moments) @ states,  # sum_i R_i sum_t w_t phi_t
            rollouts=(rollouts.lengths[rollouts.scored] > 0).sum().to(moments),
        )
        self._widen_range(rewards)
        if self._state["moments"][-1, -1] > 0:
            self._state["coefficients"] = self._solved("moments", "target", "rollouts")

    def _predicted(self, phi: Tensor) -> Tensor:
        """Returns theta . phi, clipped to the range of the rewards seen so far. (..., d + 1) -> (...)."""
        return (phi @ self._kept("coefficients", phi)).clamp(self._kept("low", phi), self._kept("high", phi))


def features(tokens: TokenStates) -> Tensor:
    """Returns phi (B, T, d + 1): hidden states followed by a 1, all 0 past the last own token; float64 on a CPU."""
    import torch

    hidden = tokens.hidden_states
    dtype = torch.float64 if hidden.device.type == "cpu" else torch.float32
    return torch.cat([hidden, tokens.own.unsqueeze(-1).to(hidden)], dim=-1).to(dtype)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype for running sums and solves: float64 if the device has it, else float32."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def ridge(moments: Tensor, target: Tensor, rollouts: Tensor, pseudo_rollouts: float) -> Tensor:
    """Returns the coefficients (d + 1) of phi = [h; 1].

    moments: sum w phi phi^T, (d + 1, d + 1). target: sum w R phi, (d + 1). rollouts: their number in these sums.

    z is h, standardised by its w-weighted mean and spread; the intercept is free.
    theta = (sum w z z^T + pseudo_rollouts (sum w / rollouts) I)^-1 sum w z (R - mean R). This equals a fit with
    `pseudo_rollouts` more rollouts of average weight whose reward is unrelated to z. A direction without spread gets 0.
    """
    import torch

    weight, mean = moments[-1, -1], moments[:-1, -1] / moments[-1, -1]
    covariance = moments[:-1, :-1] / weight - torch.outer(mean, mean)
    spread = covariance.diagonal().clamp(min=0).sqrt()
    scale = torch.where(spread > 1e-6 * spread.amax(), 1 / spread, 0.0)
    mean_reward = target[-1] / weight
    correlation = covariance * torch.outer(scale, scale)
    penalty = torch.eye(len(scale), dtype=scale.dtype, device=scale.device) * (pseudo_rollouts / rollouts)
    slopes = torch.linalg.solve(correlation + penalty, (target[:-1] / weight - mean * mean_reward) * scale) * scale
    return torch.cat([slopes, (mean_reward - slopes @ mean).unsqueeze(0)])
