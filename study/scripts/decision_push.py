"""Computes the push of estimators on a decision of a policy. study/scripts/decision.py prints it.

A rollout decides at the first place where it emits either of two tokens. Treat the log-odds of the first token over
the second, at all these places, as one parameter: an estimator's push is its gradient with respect to it, the mean over
rollouts of A (c - p). Here c is 1 if the rollout took the first token and else 0, p is the policy's probability of the
first among the two, and A is the advantage of that token. A rollout that never decides counts as 0. RLOO's push is the
true gradient on average. Intervals are over prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from numpy.typing import ArrayLike
from omegaconf import OmegaConf
from torch import Tensor

from analysis.arms import label
from analysis.intervals import bootstrap
from experiments.running.command_line import CONF
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.errors import RunError
from otb.laboratory.estimators import Prompt, fitted, rollout_advantages
from otb.laboratory.moments import partitions
from otb.laboratory.scores import Rollout, measure
from study.scripts.tiny_sampler import TinySampler, single_turn_task, tiny_sampler

ESTIMATORS = ("rloo", "otb", "otb_loo", "sequence_energy", "energy_probe", "group_mean", "none")
TASK, FIRST, SECOND = "arithmetic_long", "check ", r"\boxed{"
ROLLOUTS, GROUP_SIZE = 32, 4  # of each prompt
PROMPTS_AT_ONCE, PARTITIONS = 8, 8
FIT_STEPS, PROMPTS_PER_STEP = 10, 16  # from which baselines that learn have learned before they are measured


class PromptDecisions(NamedTuple):
    """The rollouts of one prompt and where they decide.

    at (M,) int: the own token, -1 where a rollout never decides. first (M,) bool: it took the first of the two.
    probability (M,): of the first among the two, 0 where it never decides.
    """

    prompt: Prompt
    at: Tensor
    first: Tensor
    probability: Tensor


class Sample(NamedTuple):
    """What is measured of one policy. fit: other prompts, from which baselines that learn have learned."""

    decisions: list[PromptDecisions]
    fit: list[Prompt]


def sampled(source: TinySampler, tokens: list[int], prompts: range, rollouts: int, group_size: int) -> Sample:
    """Samples a policy and finds where its rollouts decide between two tokens.

    prompts: which of the training set. rollouts: of each. group_size: rollouts of each prompt of the fit.
    """
    rows = list(source.task.train_dataset())
    found, fit = [], []
    for start in prompts[::PROMPTS_AT_ONCE]:
        some = rows[start : min(start + PROMPTS_AT_ONCE, prompts.stop)]
        drawn = source.sampler.rollouts(some, rollouts, seed=start)
        found += [decisions_of(source.model, of_prompt, tokens) for of_prompt in drawn]
        print(f"prompt {len(found)} of {len(prompts)}", flush=True)
    for start in range(len(rows) - FIT_STEPS * PROMPTS_PER_STEP, len(rows), PROMPTS_PER_STEP):
        drawn = source.sampler.rollouts(rows[start : start + PROMPTS_PER_STEP], group_size, seed=start)
        fit += [Prompt(measure(source.model, of_prompt, 1.0, None)) for of_prompt in drawn]
    return Sample(found, fit)


def two_tokens(tokenizer, first: str, second: str) -> list[int]:
    """Returns the ids of two texts. Raises RunError where one is not a token, or both are the same."""
    ids = []
    for text in (first, second):
        found = tokenizer(text, add_special_tokens=False).input_ids
        if len(found) != 1 or found in ids:
            raise RunError(
                f"{text!r} is token {found} of this policy; a decision is between two different single ones."
            )
        ids.append(found)
    return [token for (token,) in ids]


@torch.no_grad()
def decisions_of(model, rollouts: list[Rollout], tokens: list[int]) -> PromptDecisions:
    """Finds where the rollouts of one prompt decide between two tokens."""
    prompt = Prompt(measure(model, rollouts, 1.0, None))
    count = len(rollouts)
    at, first, probability = torch.full((count,), -1), torch.zeros(count, dtype=torch.bool), torch.zeros(count)
    for i, rollout in enumerate(rollouts):
        own = rollout.ids[rollout.own]
        if len(places := torch.isin(own, torch.tensor(tokens)).nonzero()[:, 0]):
            at[i], first[i] = places[0], own[places[0]] == tokens[0]
            logits = model.get_output_embeddings()(prompt.hidden_states[i, at[i]].to(model.device))[tokens].cpu()
            probability[i] = logits.softmax(-1)[0]
    return PromptDecisions(prompt, at, first, probability)


def pushes(baseline: Callable, found: PromptDecisions, group_size: int) -> Tensor:
    """Returns the pushes of an estimator on the decision of one prompt: (partitions, groups), a mean per group."""
    generator = torch.Generator().manual_seed(0)  # the same groups for every estimator
    members = partitions(len(found.at), group_size, PARTITIONS, generator)
    advantage = rollout_advantages(baseline, found.prompt, members)
    advantage = advantage.expand(-1, -1, found.prompt.own.shape[1])  # (K, M, T)
    at_decision = advantage[:, torch.arange(len(found.at)), found.at.clamp(min=0)]
    of_rollouts = at_decision * (found.at >= 0) * (found.first.float() - found.probability)
    return of_rollouts[torch.arange(PARTITIONS)[:, None, None], members].mean(2)


def mean_pushes(baseline: Callable, found: Iterable[PromptDecisions], group_size: int) -> np.ndarray:
    """Returns the mean push of an estimator on the decisions of each prompt, (prompts,)."""
    return np.array([float(pushes(baseline, one, group_size).mean()) for one in found])


def whatever_is_chosen(found: PromptDecisions) -> PromptDecisions:
    """Returns the same rollouts, the energy of whose decisions is its mean over what could have been chosen there."""
    prompt = copy.copy(found.prompt)
    prompt.score_norms = prompt.score_norms.clone()
    rows = (found.at >= 0).nonzero()[:, 0]
    places = rows, found.at[rows]
    prompt.score_norms[places] = 1 - prompt.log_sum_sq_probs[places].exp()  # E[1 - 2 pi(y) + sum pi^2]
    return found._replace(prompt=prompt)


def rollouts_table(found: list[PromptDecisions], first: str) -> pd.DataFrame:
    """Returns one row: what share of rollouts ends right, decides, takes the first token, and what that is worth."""
    rewards = torch.stack([one.prompt.rewards for one in found]).numpy()
    decide = torch.stack([one.at >= 0 for one in found]).numpy()
    took = torch.stack([one.first for one in found]).numpy()
    ends = zip(rewards, took, decide & ~took, strict=True)
    differences = [reward[one].mean() - reward[two].mean() for reward, one, two in ends if one.any() and two.any()]
    shown = {
        "right": rewards.mean(1),
        "decide": decide.mean(1),
        f"take {first!r}": took.mean(1),
        "right if so, minus right if they take the other, of one prompt": differences,
    }
    return pd.DataFrame([{name: over_prompts(values) for name, values in shown.items()}])


def push_table(samples: list[Sample], first: str, group_size: int) -> pd.DataFrame:
    """Returns a row per estimator: its push, how far from RLOO's, and its variance.

    (N - 1) / N of RLOO's push is what a group mean has left, whose rollouts are in their own baseline: the measure for
    estimators of which that is true as well.
    """
    moments = {}
    for name in ESTIMATORS:
        baseline = instantiate(OmegaConf.load(CONF / "baseline" / f"{name}.yaml"))
        of_policies = []
        for sample in samples:
            learned = fitted(baseline, sample.fit, group_size, PROMPTS_PER_STEP)
            of_policies += [pushes(learned, one, group_size) for one in sample.decisions]
        of_prompts = torch.stack(of_policies)  # (prompts, partitions, groups)
        moments[name] = of_prompts.mean((1, 2)).numpy(), of_prompts.var(2).mean(1).numpy()
    rloo_push, rloo_variance = moments["rloo"]
    rows = [
        {
            "estimator": label(name, group_size),
            f"push towards {first!r}": over_prompts(push),
            "minus RLOO's": over_prompts(push - rloo_push),
            "minus (N - 1) / N of RLOO's": over_prompts(push - (1 - 1 / group_size) * rloo_push),
            "variance over groups / RLOO's": str(bootstrap([np.stack([variance, rloo_variance], 1)], ratio_of_sums)),
        }
        for name, (push, variance) in moments.items()
    ]
    return pd.DataFrame(rows)


def parts_table(found: list[PromptDecisions], first: str, group_size: int) -> pd.DataFrame:
    """Splits OTB's push into parts. A rollout is in its own baseline, with a share omega of the energy.

    The parts: the damping by 1 / N on average, which `group_mean` has too; the effect of omega before the choice; and
    the effect of the energy of the choice itself.
    """
    shrunk = mean_pushes(rloo, found, group_size) * (1 - 1 / group_size)
    before = mean_pushes(otb, map(whatever_is_chosen, found), group_size)
    whole = mean_pushes(otb, found, group_size)
    shown = {
        "(N - 1) / N of RLOO's": shrunk,
        "the energy up to the decision": before - shrunk,
        "the energy of what is chosen": whole - before,
        label("otb", group_size): whole,
    }
    rows = [{"part": part, f"push towards {first!r}": over_prompts(values)} for part, values in shown.items()]
    return pd.DataFrame(rows)


def halves_table(found: list[PromptDecisions], first: str, group_size: int) -> pd.DataFrame:
    """Returns what each half of a prompt's rollouts adds to the pushes: those that spent less up to there, and more."""
    more = [spent_more(one) for one in found]
    rows = []
    for half, counted in {"less": [~one for one in more], "more": more}.items():
        halves = [half_of(one, rollouts) for one, rollouts in zip(found, counted, strict=True)]
        theirs, ours = (over_prompts(mean_pushes(baseline, halves, group_size)) for baseline in (rloo, otb))
        pushed = {f"{label('rloo', group_size)}: push towards {first!r}": theirs, label("otb", group_size): ours}
        rows.append({"energy before the decision": half} | pushed)
    return pd.DataFrame(rows)


def spent_more(found: PromptDecisions) -> Tensor:
    """Tells which rollouts (M,) had spent more energy before they decided than the median one of those that decide."""
    norms = found.prompt.score_norms
    spent = (norms.cumsum(1) - norms).gather(1, found.at.clamp(min=0)[:, None])[:, 0]
    return spent > spent[found.at >= 0].median()


def half_of(found: PromptDecisions, counted: Tensor) -> PromptDecisions:
    """Returns the same rollouts, of which those that are not `counted` (M,) never decide."""
    return found._replace(at=found.at.where(counted, -1))


def over_prompts(values: ArrayLike) -> str:
    """Returns a mean over prompts with its interval, "" where there is none."""
    return str(bootstrap([values], partial(np.mean, axis=0))) if np.size(values) else ""


def ratio_of_sums(paired: np.ndarray) -> np.ndarray:
    """Returns the sum of the first column over that of the second. paired (prompts, ..., 2)."""
    sums = paired.sum(axis=0)
    with np.errstate(invalid="ignore"):  # where all rewards are equal nothing is pushed
        return sums[..., 0] / sums[..., 1]


def tables(policies: Sequence[str | None], prompts: int) -> list[pd.DataFrame]:
    """Measures policies, each with `prompts` prompts of its own, and returns the tables to show.

    policies: folders of checkpoints; None for the warm-started one.
    """
    task, samples = single_turn_task(TASK), []
    for number, folder in enumerate(policies):
        source = tiny_sampler(task, folder, "runs/decision")
        tokens = two_tokens(source.tokenizer, FIRST, SECOND)
        rows = range(number * prompts, (number + 1) * prompts)
        samples.append(sampled(source, tokens, rows, ROLLOUTS, GROUP_SIZE))
    found = [decisions for sample in samples for decisions in sample.decisions]
    shown = rollouts_table(found, FIRST), push_table(samples, FIRST, GROUP_SIZE)
    return [*shown, parts_table(found, FIRST, GROUP_SIZE), halves_table(found, FIRST, GROUP_SIZE)]
