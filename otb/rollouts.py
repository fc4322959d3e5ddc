"""Prompt groups as a baseline sees them: rewards, own-token counts and squared score norms, shapes checked once.

The trainer, the conformance check and the variance laboratory build `RolloutGroups`; baselines and `advantages` read
them. `OwnTokens` first drops tool and padding positions. Position t is therefore the t-th token that the policy
sampled, and the same estimator works for single-turn and tool-integrated rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


class MeasuredOnRequest:
    """Fields that are None unless the baseline declares that it needs them."""

    def required(self, name: str) -> Tensor:
        """Returns the field called `name`. Raises ValueError if it is None."""
        values = getattr(self, name)
        if values is None:
            raise ValueError(
                f"{name}=None: it is measured only for baselines that declare it. Use @declare(needs={{{name!r}}})."
            )
        return values


@dataclass(frozen=True)
class RolloutGroups(MeasuredOnRequest):
    """Holds P prompt groups of G rollouts, each with up to T own tokens.

    Args:
        rewards: (P, G) float, one terminal reward per rollout; NaN = unscored, and left out of its group's sums.
        lengths: (P, G) int, own tokens per rollout; 0 is allowed.
        score_norms: (P, G, T) float >= 0 or None: squared score norm w of each own token, already multiplied by
            rho^2 under importance sampling; 0 at t >= lengths, as `OwnTokens.pack` leaves it.
        token_returns: (P, G, T) float or None: reward to go per own token; None = the terminal reward everywhere.
        sequence_norms: (P, G) float >= 0 or None: exact squared norm of the rollout's score, ||sum_t s_t||^2, over all
            trainable parameters; under importance sampling rho_t s_t replaces s_t.
        prefix_norms: (P, G, T) float >= 0 or None: exact ||sum_{j<=t} s_j||^2; like `energy`, it keeps its last value
            after the last own token.
        reduced: name -> tensor (P, G, ...): the rows that the baseline's `reduce` returned for each rollout.
        totals: name -> tensor of any shape: the totals that `reduce` returned, summed over the rollouts of all
            processes.

    Raises:
        ValueError: a shape does not match the others.
    """

    rewards: Tensor
    lengths: Tensor
    score_norms: Tensor | None = None
    token_returns: Tensor | None = None
    sequence_norms: Tensor | None = None
    prefix_norms: Tensor | None = None
    reduced: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if self.rewards.dim() != 2 or self.lengths.shape != self.rewards.shape:
            raise ValueError(
                f"rewards {tuple(self.rewards.shape)} and lengths {tuple(self.lengths.shape)} must both be "
                "(prompts, group_size)."
            )
        for name in ("score_norms", "token_returns", "prefix_norms"):
            values = getattr(self, name)
            if values is not None and (values.dim() != 3 or values.shape[:2] != self.rewards.shape):
                raise ValueError(
                    f"{name} has shape {tuple(values.shape)}; it must be (prompts, group_size, own tokens) with "
                    f"(prompts, group_size) = {tuple(self.rewards.shape)}."
                )
        per_rollout = {"sequence_norms": self.sequence_norms} if self.sequence_norms is not None else {}
        for name, values in (per_rollout | self.reduced).items():
            if values.shape[:2] != self.rewards.shape:
                raise ValueError(
                    f"{name} has shape {tuple(values.shape)}; it must begin with (prompts, group_size) = "
                    f"{tuple(self.rewards.shape)}."
                )

    @property
    def group_size(self) -> int:
        """G, rollouts per prompt."""
        return self.rewards.shape[1]

    @cached_property
    def tokens(self) -> int:
        """T, the width of the own-token axis; 1 if no field has such an axis."""
        for per_token in (self.score_norms, self.prefix_norms, self.token_returns):
            if per_token is not None:
                return per_token.shape[2]
        return int(self.lengths.max()) if self.reduced and self.lengths.numel() else 1

    @cached_property
    def scored(self) -> Tensor:
        """(P, G) bool: the rollout has a reward."""
        return ~self.rewards.isnan()

    @cached_property
    def own(self) -> Tensor:
        """(P, G, T) bool: the rollout reaches its t-th own token."""
        return self.reached(self.tokens)

    def reached(self, tokens: int) -> Tensor:
        """Returns (P, G, tokens) bool: the rollout reaches its t-th own token, on an axis of any width."""
        t = torch.arange(tokens, device=self.lengths.device, dtype=self.lengths.dtype)
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
        """(P, G, T): realized energy W_t = sum_{j<=t} w_j; after the last own token it keeps its last value."""
        return self.required("score_norms").cumsum(-1)


@dataclass(frozen=True)
class TokenStates(MeasuredOnRequest):
    """One micro-batch of the policy's forward, packed to own tokens; a baseline's `reduce` reads it.

    Hidden states of a whole batch are too large to keep, so `reduce` gets them one micro-batch at a time.

    Args:
        own: (B, T) bool: the rollout reaches its t-th own token.
        hidden_states: (B, T, d) float, detached: the final hidden state that predicts own token t, after the last norm,
            as the LM head reads it; 0 past the last own token.
        log_probs, log_sum_sq_probs: (B, T) float: log pi of the own token and log sum pi^2 over the vocabulary, at the
            sampling temperature.
        score_norms: (B, T) float >= 0 or None: w, times rho^2 under importance sampling; None if not declared.
        scored: (B,) bool or None: False for a rollout without reward, which no sum includes; None = all scored.
    """

    own: Tensor
    hidden_states: Tensor
    log_probs: Tensor
    log_sum_sq_probs: Tensor
    score_norms: Tensor | None = None
    scored: Tensor | None = None

    @cached_property
    def alive(self) -> Tensor:
        """(B, T) bool: own tokens of scored rollouts."""
        return self.own if self.scored is None else self.own & self.scored.unsqueeze(-1)

    @cached_property
    def last(self) -> Tensor:
        """(B, T) bool: the last own token of each rollout."""
        return self.own & ~torch.nn.functional.pad(self.own, (0, 1))[:, 1:]


def joined(chunks: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates tensors along their first dimension, after padding dimension `dim` with 0 to the widest.

    Tensors without a dimension `dim` are only concatenated. Chunks (n_k, ...) -> (sum of n_k, ...).
    """
    if chunks[0].dim() <= dim:
        return torch.cat(list(chunks))
    widest = max(chunk.shape[dim] for chunk in chunks)
    behind = [0, 0] * (chunks[0].dim() - dim - 1)
    return torch.cat([torch.nn.functional.pad(chunk, (*behind, 0, widest - chunk.shape[dim])) for chunk in chunks])


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
        self.own = t < self.lengths.unsqueeze(-1)  # (B, T)
        # Without gaps the packed layout is a prefix of the padded one and nothing has to move. Bytes are compared,
        # because comparing bools is ten times slower on a CPU.
        within = response_mask[:, : self.width].contiguous()
        self._unbroken = not (within.view(torch.uint8) ^ self.own.view(torch.uint8)).any()

    def pack(self, values: Tensor) -> Tensor:
        """Returns the own tokens' values, left-aligned, then 0. (B, C) or (B, C, d) -> (B, T) or (B, T, d)."""
        own, mask = (self.own, self.mask) if values.dim() == 2 else (self.own.unsqueeze(-1), self.mask.unsqueeze(-1))
        if self._unbroken:
            return torch.where(own, values[:, : self.width], 0.0)
        packed = values.new_zeros(self.own.shape + values.shape[2:])
        return packed.masked_scatter_(own, values.masked_select(mask))

    def unpack(self, packed: Tensor) -> Tensor:
        """Returns packed values at their padded positions, 0 elsewhere. (B, T), 0 past the last own token -> (B, C)."""
        if self._unbroken:
            padding = self.mask.shape[1] - self.width
            return torch.nn.functional.pad(packed, (0, padding)) if padding else packed
        return packed.new_zeros(self.mask.shape).masked_scatter_(self.mask, packed.masked_select(self.own))
