"""Computes the gradients of prompt groups under a baseline with the code that trains: `reduce`, baseline, `advantages`.

A baseline that learns is first fitted on other prompts of the same policy, step by step as in training.
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
from otb.rollouts import RolloutGroups, TokenStates, joined
from otb.score_norms import logit_gradient_proxy


class Prompt:
    """The M measured rollouts of one prompt, padded: everything that baselines read, and sketched scores (M, T, D)."""

    def __init__(self, measured: Measured):
        self.rewards = torch.from_numpy(measured.rewards).float()
        self.lengths = torch.from_numpy(measured.lengths)
        self.log_probs = measured.padded("log_probs")
        self.log_sum_sq_probs = measured.padded("log_sum_sq_probs")
        self.hidden_states = measured.padded("hidden_states")
        self.own = torch.arange(self.log_probs.shape[1]) < self.lengths.unsqueeze(1)
        self.score_norms = logit_gradient_proxy(self.log_probs, self.log_sum_sq_probs) * self.own
        self.sketches: Tensor | None = None  # None, like the next two, if measured without scores
        self.token_norms: Tensor | None = None
        self.prefix_norms: Tensor | None = None
        if measured.sketches.size:
            self.sketches = measured.padded("sketches")
            self.token_norms = measured.padded("token_norms")
            self.prefix_norms = kept_after_end(measured.padded("prefix_norms"), self.lengths)

    def states(self) -> TokenStates:
        """Returns the token states of all rollouts, as the trainer passes them to `reduce`."""
        probabilities = (self.log_probs, self.log_sum_sq_probs, self.score_norms)
        return TokenStates(self.own, self.hidden_states, *probabilities, ~self.rewards.isnan())

    def groups(self, members: Tensor, reduced: dict[str, Tensor], totals: dict[str, Tensor]) -> RolloutGroups:
        """Returns groups of these rollouts. members (P, G) int: the rollouts of each group."""
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
    """Returns a copy of the baseline that has learned from steps of `prompts_per_step` prompts, as in a run."""
    baseline = copy.deepcopy(baseline)
    if not baselines.carries_state(baseline):
        return baseline
    for start in range(0, len(prompts) - prompts_per_step + 1, prompts_per_step):
        baseline.update(step_groups(baseline, prompts[start : start + prompts_per_step], group_size))
    return baseline


def step_groups(baseline: Callable, prompts: list[Prompt], group_size: int) -> RolloutGroups:
    """Returns the groups of one step: the first `group_size` rollouts of each prompt."""
    parts = []
    for prompt in prompts:
        rows, totals = {}, {}
        if hasattr(baseline, "reduce"):
            states = prompt.states()
            states = TokenStates(*(getattr(states, name)[:group_size] for name in states.__dataclass_fields__))
            rows, totals = baseline.reduce(states)
        parts.append(prompt.groups(torch.arange(group_size).unsqueeze(0), rows, totals))
    return joined_groups(parts)


def joined_groups(parts: list[RolloutGroups]) -> RolloutGroups:
    """Joins the groups of several prompts, padded to the widest, and adds up their totals."""
    first, *others = parts
    per_rollout = ("rewards", "lengths", "score_norms")
    return RolloutGroups(
        **{name: joined([getattr(part, name) for part in parts], dim=2) for name in per_rollout},
        reduced={name: joined([part.reduced[name] for part in parts], dim=2) for name in first.reduced},
        totals={name: sum((part.totals[name] for part in others), start=first.totals[name]) for name in first.totals},
    )


def rollout_advantages(baseline: Callable, prompt: Prompt, members: Tensor) -> Tensor:
    """Returns the advantages (K, M, T or 1) of every rollout in each of K partitions, 0 for rollouts in no group.

    members (K, n, N) int: the rollouts of the n groups of each partition.
    """
    rows, totals = baseline.reduce(prompt.states()) if hasattr(baseline, "reduce") else ({}, {})
    groups = members.flatten(0, 1)
    rollouts = prompt.groups(groups, rows, totals)
    in_groups = advantages(rollouts, baseline(rollouts))  # (K * n, N, T or 1)
    drawn = in_groups.view(len(members), -1, in_groups.shape[-1])  # (K, n * N, T or 1)
    index = members.flatten(1).unsqueeze(-1).expand_as(drawn)
    return drawn.new_zeros(len(members), len(prompt.rewards), drawn.shape[-1]).scatter(1, index, drawn)


def rollout_gradients(prompt: Prompt, advantage: Tensor) -> Tensor:
    """Returns the sketch of sum_t A_t s_t per rollout. advantage (K, M, T or 1) -> (K, M, D)."""
    sketches = require_scores(prompt.sketches)
    advantage = advantage.expand(-1, -1, sketches.shape[1])
    return (advantage.transpose(0, 1) @ sketches).transpose(0, 1)


def require_scores(values: Tensor | None) -> Tensor:
    """Returns a field that only prompts measured with scores have. Raises ValueError if it is None."""
    if values is None:
        raise ValueError("This prompt was measured without scores (`measure(..., sketch=None)`). Pass a sketch.")
    return values
