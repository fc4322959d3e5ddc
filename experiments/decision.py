r"""Measures which way estimators push a decision of the policy, such as whether it checks its sum or answers at once.

python experiments/decision.py arithmetic_long "check " "\boxed{" --policy runs/.../checkpoints/step-00000060
A rollout decides at its first token that is one of the two. The push of an estimator is what its gradient adds to the
log-odds of the first one: the mean over rollouts of A_t (1[first] - p), where p is the probability of the first among
the two, and 0 for a rollout that never decides. RLOO's is unbiased. Intervals are over prompts. Of the tiny policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
from analysis.report.markdown import markdown_table
from experiments.command_line import CONF, exit_codes
from experiments.tiny_sampler import tiny_sampler
from otb.errors import RunError
from otb.laboratory.estimators import Prompt, fitted, rollout_advantages
from otb.laboratory.moments import partitions
from otb.laboratory.scores import Rollout, measure

ESTIMATORS = ("rloo", "otb", "otb_loo", "sequence_energy", "energy_probe", "group_mean", "none")  # RLOO first
PROMPTS_AT_ONCE, PARTITIONS = 8, 8
FIT_STEPS, PROMPTS_PER_STEP = 10, 16  # from which baselines that learn have learned before they are measured


class Decisions(NamedTuple):
    """The rollouts of one prompt and where they decide.

    at (M,) int: the own token, -1 where a rollout never decides. first (M,) bool: it took the first of the two.
    probability (M,): of the first among the two, 0 where it never decides.
    """

    prompt: Prompt
    at: Tensor
    first: Tensor
    probability: Tensor


def decisions(
    task_name: str, policy: str | None, texts: list[str], prompts: int, rollouts: int, group_size: int
) -> tuple[list[Decisions], list[Prompt]]:
    """Samples rollouts and finds where they decide; returns with them other prompts, for baselines that learn.

    policy: a folder; None for the warm-started policy. group_size: rollouts of each of the other prompts. Raises
    RunError where a text is not one token, or the task has tools.
    """
    task, model, tokenizer, sampler = tiny_sampler(task_name, policy, "runs/decision")
    tokens = [one_token(tokenizer, text) for text in texts]
    rows = list(task.train_dataset())
    found, others = [], []
    for start in range(0, prompts, PROMPTS_AT_ONCE):
        some = rows[start : min(start + PROMPTS_AT_ONCE, prompts)]
        found += [decided(model, drawn, tokens) for drawn in sampler.rollouts(some, rollouts, seed=start)]
        print(f"prompt {len(found)} of {prompts}", flush=True)
    for step in range(FIT_STEPS):
        some = rows[prompts + step * PROMPTS_PER_STEP :][:PROMPTS_PER_STEP]
        drawn = sampler.rollouts(some, group_size, seed=prompts + step)
        others += [Prompt(measure(model, of_prompt, 1.0, None)) for of_prompt in drawn]
    return found, others


def one_token(tokenizer, text: str) -> int:
    """Returns the id of a text that is one token. Raises RunError where it is not."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise RunError(f"{text!r} is {len(ids)} tokens of this policy, and a decision is between two single ones.")
    return ids[0]


@torch.no_grad()
def decided(model, rollouts: list[Rollout], tokens: list[int]) -> Decisions:
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
    return Decisions(prompt, at, first, probability)


def pushes(baseline: Callable, found: Decisions, group_size: int) -> Tensor:
    """Returns the pushes of an estimator on the decision of one prompt: (partitions, groups), a mean per group."""
    generator = torch.Generator().manual_seed(0)  # the same groups for every estimator
    members = partitions(len(found.at), group_size, PARTITIONS, generator)
    advantage = rollout_advantages(baseline, found.prompt, members)
    advantage = advantage.expand(-1, -1, found.prompt.own.shape[1])  # (K, M, T)
    at_decision = advantage[:, torch.arange(len(found.at)), found.at.clamp(min=0)]
    of_rollouts = at_decision * (found.at >= 0) * (found.first.float() - found.probability)
    return of_rollouts[torch.arange(PARTITIONS)[:, None, None], members].mean(2)


def rollouts_table(found: list[Decisions], first: str) -> pd.DataFrame:
    """Returns one row: what share of rollouts ends right, decides, takes the first token, and what that is worth."""
    rewards = torch.stack([one.prompt.rewards for one in found]).numpy()
    decide = torch.stack([one.at >= 0 for one in found]).numpy()
    took = torch.stack([one.first for one in found]).numpy()
    ends = zip(rewards, took, decide & ~took, strict=True)
    differences = [
        rewards[one].mean() - rewards[other].mean() for rewards, one, other in ends if one.any() and other.any()
    ]
    shown = {
        "right": rewards.mean(1),
        "decide": decide.mean(1),
        f"take {first!r}": took.mean(1),
        "right if so, minus right if not, of one prompt": differences,
    }
    return pd.DataFrame([{name: over_prompts(values) for name, values in shown.items()}])


def push_table(found: list[Decisions], others: list[Prompt], first: str, group_size: int) -> pd.DataFrame:
    """Returns a row per estimator: its push, how far from RLOO's, and its variance. found, others: of `decisions`."""
    moments = {}
    for name in ESTIMATORS:
        baseline = instantiate(OmegaConf.load(CONF / "baseline" / f"{name}.yaml"))
        baseline = fitted(baseline, others, group_size, PROMPTS_PER_STEP)
        of_prompts = torch.stack([pushes(baseline, one, group_size) for one in found])  # (prompts, partitions, groups)
        moments[name] = of_prompts.mean((1, 2)).numpy(), of_prompts.var(2).mean(1).numpy()
    their_push, their_variance = moments["rloo"]
    rows = [
        {
            "estimator": label(name, group_size),
            f"push towards {first!r}": over_prompts(push),
            "minus RLOO's": "" if name == "rloo" else over_prompts(push - their_push),
            "variance over groups / RLOO's": ""
            if name == "rloo"
            else str(bootstrap([np.stack([variance, their_variance], axis=1)], ratio_of_sums)),
        }
        for name, (push, variance) in moments.items()
    ]
    return pd.DataFrame(rows)


def over_prompts(values: ArrayLike) -> str:
    """Returns a mean over prompts with its interval, "" where there is none."""
    return str(bootstrap([values], partial(np.mean, axis=0))) if np.size(values) else ""


def ratio_of_sums(paired: np.ndarray) -> np.ndarray:
    """Returns the sum of the first column over that of the second. paired (prompts, ..., 2)."""
    sums = paired.sum(axis=0)
    with np.errstate(invalid="ignore"):  # where all rewards are equal nothing is pushed
        return sums[..., 0] / sums[..., 1]


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/decision.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    parser = argparse.ArgumentParser(prog="python experiments/decision.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", help="of conf/task, such as arithmetic_long")
    parser.add_argument("first", help="text of one token, such as 'check '")
    parser.add_argument("second", help="text of the other")
    parser.add_argument("--policy", help="folder of a checkpoint; the warm-started policy where it is not given")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=32, help="of each prompt")
    parser.add_argument("--group-size", type=int, default=4)
    options = parser.parse_args(arguments)
    with exit_codes(after_stop="begins anew"):
        if options.rollouts < 2 * options.group_size:
            raise RunError(f"--rollouts {options.rollouts} are fewer than two groups of {options.group_size}.")
        texts = [options.first, options.second]
        sizes = options.prompts, options.rollouts, options.group_size
        found, others = decisions(options.task, options.policy, texts, *sizes)
        print(f"\n{markdown_table(rollouts_table(found, options.first))}")
        print(f"\n{markdown_table(push_table(found, others, options.first, options.group_size))}")


if __name__ == "__main__":
    command_line(sys.argv[1:])
