"""Enumerates a tiny policy: every response with its probability and exact scores, and every group of responses."""

import copy
from dataclasses import replace

import torch

from otb.advantages import advantages
from otb.baselines import carries_state
from otb.rollouts import RolloutGroups, TokenStates
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy

VOCABULARY, LONGEST, END = 3, 3, 0


def responses(prefix=()):
    """Yields every response: it ends with token 0, or with the third token."""
    for token in range(VOCABULARY):
        response = (*prefix, token)
        if token == END or len(response) == LONGEST:
            yield response
        else:
            yield from responses(response)


RESPONSES = list(responses())  # (0,), (1, 0), (1, 1, 0), ...: 1 + 2 + 2 x 2 x 3 = 15
PREFIXES = sorted({response[:t] for response in RESPONSES for t in range(len(response))})  # 1 + 2 + 4 = 7


class ToyPolicy:
    """Has a row of logits per prefix, 21 parameters in all; holds every quantity of all 15 responses, in float64."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logits = normal(len(PREFIXES), VOCABULARY)
        features = normal(len(PREFIXES), 4)  # stands for the hidden state
        self.rewards = torch.rand(len(RESPONSES), generator=generator, dtype=torch.float64)
        self.lengths = torch.tensor([len(response) for response in RESPONSES])
        self.own = torch.arange(LONGEST) < self.lengths.unsqueeze(1)
        self.row = torch.zeros(len(RESPONSES), LONGEST, dtype=torch.long)  # of the prefix before the token
        self.token = torch.zeros_like(self.row)
        for i, response in enumerate(RESPONSES):
            self.row[i, : len(response)] = torch.tensor([PREFIXES.index(response[:t]) for t in range(len(response))])
            self.token[i, : len(response)] = torch.tensor(response)
        self.log_probs = self._log_probs(logits)
        self.log_sum_sq_probs = log_sum_squared_probs(logits)[self.row] * self.own
        self.hidden_states = features[self.row] * self.own.unsqueeze(-1)
        self.score_norms = logit_gradient_proxy(self.log_probs, self.log_sum_sq_probs) * self.own
        self.scores = torch.autograd.functional.jacobian(self._log_probs, logits).flatten(2)  # (15, 3, 21)
        self.prefix_norms = self.scores.cumsum(1).square().sum(-1)
        self.probabilities = self.log_probs.sum(1).exp()
        self.gradient = torch.einsum("i,i,itd->d", self.probabilities, self.rewards, self.scores)  # of E[R]

    def _log_probs(self, logits):
        return logits.log_softmax(-1)[self.row, self.token] * self.own

    def groups(self, members) -> RolloutGroups:
        """Returns RolloutGroups. members (P, G) int: the responses of each group."""
        return RolloutGroups(
            rewards=self.rewards[members],
            lengths=self.lengths[members],
            score_norms=self.score_norms[members],
            sequence_norms=self.prefix_norms[members][..., -1],
            prefix_norms=self.prefix_norms[members],
        )

    def seen(self, baseline, members) -> RolloutGroups:
        """Returns `groups` with the results of the baseline's `reduce`."""
        groups = self.groups(members)
        if not hasattr(baseline, "reduce"):
            return groups
        states = (self.own, self.hidden_states, self.log_probs, self.log_sum_sq_probs, self.score_norms)
        rows, totals = baseline.reduce(TokenStates(*(each[members.flatten()] for each in states)))
        reduced = {name: values.unflatten(0, members.shape) for name, values in rows.items()}
        return replace(groups, reduced=reduced, totals=totals)

    def draw(self, groups: int, size: int, seed: int):
        """Draws responses from the policy, (groups, size) int."""
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(self.probabilities, groups * size, True, generator=generator).view(groups, size)

    def taught(self, baseline, size: int, steps=3):
        """Returns a copy of a learning baseline after some steps on groups drawn from the policy."""
        baseline = copy.deepcopy(baseline)
        for step in range(steps if carries_state(baseline) else 0):
            baseline.update(self.seen(baseline, self.draw(16, size, seed=step)))
        return baseline

    def every_group(self, size: int):
        """Returns the members (15^size, size) of every group, and the probability of each group."""
        members = torch.cartesian_prod(*[torch.arange(len(RESPONSES))] * size).view(-1, size)
        return members, self.probabilities[members].prod(1)

    def gradients(self, baseline, members):
        """Returns (1 / G) sum_i sum_t A_t^i s_t^i of each group, (P, 21), computed with the product's code."""
        rollouts = self.seen(baseline, members)
        advantage = advantages(rollouts, baseline(rollouts)).expand(*members.shape, LONGEST)
        return torch.einsum("pgt,pgtd->pd", advantage, self.scores[members]) / members.shape[1]

    def expected(self, baseline, size: int):
        """Returns E[g] (21,) and E||g||^2 of the group gradient g, over all groups."""
        members, probability = self.every_group(size)
        gradients = self.gradients(baseline, members)
        return probability @ gradients, float(probability @ gradients.square().sum(1))
