"""No baseline: the advantage is the return (plain REINFORCE)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups


@declare(unbiased=True)
def none(rollouts: RolloutGroups) -> Tensor:
    """Returns 0. rewards (P, G) -> baseline (P, 1, 1)."""
    return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, 1)
