"""From a baseline to the gradients of prompt groups, by the code that trains: `reduce`, the baseline, `advantages`.

A baseline that learns is fitted on other prompts of the same policy, step by step as in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from otb import baselines
from otb.advantages import advantages
from otb.exact_norms import kept_after_end
from otb.laboratory.scores import Measured
from otb.rollouts import RolloutGroups, TokenStates
from otb.score_norms import logit_gradient_proxy


class Prompt:
    """The measured rollouts of one prompt, padded: all that baselines read, and the sketched scores (M, T, D)."""

    def __init__(self, measured: Measured):
        self.rewards = torch.from_numpy(measured.rewards).float()
        self.lengths = torch.from_numpy(measured.lengths)
        self.log_probs = measured.padded("log_probs")
        self.log_sum_sq_probs = measured.padded("log_sum_sq_probs")
        self.hidden_states = measured.padded("hidden_states")
        self.own = torch.arange(self.log_probs.shape[1]) < self.lengths.unsqueeze(1)
        self.score_norms = logit_gradient_proxy(self.log_probs, self.log_sum_sq_probs) * self.own
        self.sketches = self.token_norms = self.prefix_norms = None
        if measured.sketches.size:
            self.sketches = measured.padded("sketches")
            self.token_norms = measured.padded("token_norms")
            self.prefix_norms = kept_after_end(measured.padded("prefix_norms"), self.lengths)

    def states(self) -> TokenStates:
        probabilities = (self.log_probs, self.log_sum_sq_probs, self.score_norms)
        return TokenStates(self.own, self.hidden_states, *probabilities, ~self.rewards.isnan())

    def groups(self, members: Tensor, reduced: dict[str, Tensor], totals: dict[str, Tensor]) -> RolloutGroups:
        """members (P, G) int: which rollouts make up each group."""
        prefix = self.prefix_norms
        return RolloutGroups(
            rewards=self.rewards[members],
            lengths=self.lengths[members],
            score_norms=self.score_norms[members],
            sequence_norms=None if prefix is None else prefix[:, -1][members],
            prefix_norms=None if prefix is None else prefix[members],
            reduced={name: rows[members] for name, rows in reduced.items()},
            totals=totals,
        )


def fitted(baseline: Callable, prompts: list[Prompt], group_size: int, prompts_per_step: int) -> Callable:
    """A copy of a baseline that learns, after steps of `prompts_per_step` prompts with `group_size` rollouts each."""
    baseline = copy.deepcopy(baseline)
    if not baselines.carries_state(baseline):
        return baseline
    for start in range(0, len(prompts) - prompts_per_step + 1, prompts_per_step):
        baseline.update(step_groups(baseline, prompts[start : start + prompts_per_step], group_size))
    return baseline


def step_groups(baseline: Callable, prompts: list[Prompt], group_size: int) -> RolloutGroups:
    """One step's groups: the first `group_size` rollouts of each prompt."""
    parts = []
    for prompt in prompts:
        rows, totals = {}, {}
        if hasattr(baseline, "reduce"):
            some = torch.arange(group_size)
            states = prompt.states()
            states = TokenStates(*(getattr(states, name)[some] for name in states.__dataclass_fields__))
            rows, totals = baseline.reduce(states)
        parts.append(prompt.groups(torch.arange(group_size).unsqueeze(0), rows, totals))
    return joined(parts)


def joined(parts: list[RolloutGroups]) -> RolloutGroups:
    """Groups of several prompts as one, padded to the widest; totals are summed."""

    def cat(tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() < 3:
            return torch.cat(tensors)
        width = max(tensor.shape[2] for tensor in tensors)
        behind = [0, 0] * (tensors[0].dim() - 3)
        return torch.cat([torch.nn.functional.pad(t, (*behind, 0, width - t.shape[2])) for t in tensors])

    per_rollout = ("rewards", "lengths", "score_norms")
    return RolloutGroups(
        **{name: cat([getattr(part, name) for part in parts]) for name in per_rollout},
        reduced={name: cat([part.reduced[name] for part in parts]) for name in parts[0].reduced},
        totals={name: sum(part.totals[name] for part in parts) for name in parts[0].totals},
    )


def rollout_advantages(baseline: Callable, prompt: Prompt, members: Tensor) -> Tensor:
    """Advantages (K, M, T or 1) of every rollout in each of K partitions. members (K, n, N); left-out rollouts: 0."""
    rows, totals = baseline.reduce(prompt.states()) if hasattr(baseline, "reduce") else ({}, {})
    groups = members.flatten(0, 1)
    rollouts = prompt.groups(groups, rows, totals)
    found = advantages(rollouts, baseline(rollouts))  # (K * n, N, T or 1)
    found = found.view(len(members), -1, found.shape[-1])
    index = members.flatten(1).unsqueeze(-1).expand_as(found)
    return found.new_zeros(len(members), len(prompt.rewards), found.shape[-1]).scatter(1, index, found)


def rollout_gradients(prompt: Prompt, advantage: Tensor) -> Tensor:
    """sum_t A_t s_t, sketched. advantage (K, M, T or 1) -> (K, M, D)."""
    advantage = advantage.expand(-1, -1, prompt.sketches.shape[1])
    return (advantage.transpose(0, 1) @ prompt.sketches).transpose(0, 1)
