"""Turns a baseline into advantages: (return - baseline) / scale on own tokens, 0 elsewhere. The trainer calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from otb.baselines import Baseline
from otb.rollouts import RolloutGroups


def advantages(rollouts: RolloutGroups, baseline: Baseline | Tensor) -> Tensor:
    """Returns the advantage of every own token.

    baseline: value (and scale) broadcastable to (P, G, T) -> (P, G, T), or (P, G, 1) if returns and baseline are the
    same for all tokens of a rollout. An unscored rollout has advantage 0: it carries no signal.
    """
    if isinstance(baseline, Baseline):
        advantage = (rollouts.returns - baseline.value) / baseline.scale
    else:
        advantage = rollouts.returns - baseline
    if advantage.shape[-1] == 1:
        return torch.where(rollouts.scored.unsqueeze(-1), advantage, 0.0)
    return torch.where(rollouts.alive, advantage, 0.0)  # promoting an integer 0 costs six times as much
