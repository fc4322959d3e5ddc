"""Prompt groups as a baseline sees them: rewards, own-token counts and squared score norms, shapes checked once.

The trainer, the conformance check and the variance laboratory build `RolloutGroups`; baselines and `advantages` read
them. Tool and padding positions are dropped by `OwnTokens` before, so position t is the t-th token that the policy
sampled and one estimator serves single-turn and tool-integrated rollouts alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutGroups:
    """P prompt groups of G rollouts with up to T own tokens each.

    Args:
        rewards: (P, G) float, one terminal reward per rollout; NaN = unscored, which leaves the sums of its group.
        lengths: (P, G) int, own tokens per rollout; 0 is allowed.
        score_norms: (P, G, T) float >= 0 or None: squared score norm w of each own token, already multiplied by
            rho^2 under importance sampling; 0 at t >= lengths, as `OwnTokens.pack` leaves it.
        token_returns: (P, G, T) float or None: reward to go per own token; None = the terminal reward everywhere.

    Raises:
        ValueError: a shape does not fit.
    """

    rewards: Tensor
    lengths: Tensor
    score_norms: Tensor | None = None
    token_returns: Tensor | None = None

    def __post_init__(self):
        if self.rewards.dim() != 2 or self.lengths.shape != self.rewards.shape:
            raise ValueError(
                f"rewards {tuple(self.rewards.shape)} and lengths {tuple(self.lengths.shape)} must both be "
                "(prompts, group_size)."
            )
        for name in ("score_norms", "token_returns"):
            values = getattr(self, name)
            if values is not None and (values.dim() != 3 or values.shape[:2] != self.rewards.shape):
                raise ValueError(
                    f"{name} has shape {tuple(values.shape)}; it must be (prompts, group_size, own tokens) with "
                    f"(prompts, group_size) = {tuple(self.rewards.shape)}."
                )

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]

    @property
    def tokens(self) -> int:
        """T, the width of the own-token axis; 1 where nothing per token was given."""
        per_token = self.score_norms if self.score_norms is not None else self.token_returns
        return 1 if per_token is None else per_token.shape[2]

    @cached_property
    def scored(self) -> Tensor:
        """(P, G) bool."""
        return ~self.rewards.isnan()

    @cached_property
    def own(self) -> Tensor:
        """(P, G, T) bool: the rollout reaches its t-th own token."""
        t = torch.arange(self.tokens, device=self.lengths.device, dtype=self.lengths.dtype)
        return t < self.lengths.unsqueeze(-1)

    @cached_property
    def alive(self) -> Tensor:
        """(P, G, T) bool: a scored rollout that reaches its t-th own token."""
        return self.own if self.scored.all() else self.own & self.scored.unsqueeze(-1)

    @cached_property
    def lone(self) -> Tensor:
        """(P, 1, T) bool: exactly one scored rollout of the group reaches the t-th own token."""
        reach = (self.lengths * self.scored).topk(min(2, self.group_size), dim=1).values.unsqueeze(-1)  # (P, 2, 1)
        t = torch.arange(self.tokens, device=reach.device)
        second = reach[:, 1:] if self.group_size > 1 else 0
        return (t < reach[:, :1]) & (t >= second)

    @cached_property
    def returns(self) -> Tensor:
        """(P, G, T) or (P, G, 1): reward to go, 0 for unscored rollouts."""
        if self.token_returns is None:
            return self.rewards.nan_to_num().unsqueeze(-1)
        return self.token_returns.masked_fill(~self.scored.unsqueeze(-1), 0)

    @cached_property
    def energy(self) -> Tensor:
        """(P, G, T): realized energy W_t = sum_{j<=t} w_j; it keeps its last value after the last own token."""
        if self.score_norms is None:
            raise ValueError("Realized energy needs score_norms; declare needs={'score_norms'} on the baseline.")
        return self.score_norms.cumsum(-1)


class OwnTokens:
    """Moves per-token values between the padded layout of a batch and the packed own-token layout.

    Args:
        response_mask: (B, C) bool, True = own token; tool tokens and padding are False, in any arrangement.
    """

    def __init__(self, response_mask: Tensor):
        self.mask = response_mask
        self.lengths = response_mask.view(torch.uint8).sum(-1, dtype=torch.int32)  # (B,); summing bools is 20x slower
        self.width = int(self.lengths.max()) if len(response_mask) else 0
        t = torch.arange(self.width, device=response_mask.device, dtype=torch.int32)
        self._own = t < self.lengths.unsqueeze(-1)  # (B, T)
        # Without gaps the packed layout is a prefix of the padded one and nothing has to move.
        within = response_mask[:, : self.width].contiguous()
        # As bytes: comparing bools is ten times slower on a CPU.
        self._unbroken = not (within.view(torch.uint8) ^ self._own.view(torch.uint8)).any()

    def pack(self, values: Tensor) -> Tensor:
        """(B, C) -> (B, T): the own tokens' values, first own token first, 0 after the last."""
        if self._unbroken:
            return torch.where(self._own, values[:, : self.width], 0.0)
        return values.new_zeros(self._own.shape).masked_scatter_(self._own, values.masked_select(self.mask))

    def unpack(self, packed: Tensor) -> Tensor:
        """(B, T), 0 past the last own token -> (B, C): packed values back at their positions, 0 elsewhere."""
        if self._unbroken:
            padding = self.mask.shape[1] - self.width
            return torch.nn.functional.pad(packed, (0, padding)) if padding else packed
        return packed.new_zeros(self.mask.shape).masked_scatter_(self.mask, packed.masked_select(self._own))
