"""EvaluatingTrainer: a ToolTrainer that can sample and grade held-out problems in the middle of its training.

RunTrainer is one, and calls it when an evaluation is due.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from experiments.running.held_out import HeldOut
from otb.methods.tool_rollouts import ENDINGS, ToolTrainer
from otb.random_state import isolated_random_state


class Samples(NamedTuple):
    """Samples of a set, (prompts, samples) each. rewards: NaN where unscored. endings: positions in ENDINGS."""

    rewards: Tensor
    own_tokens: Tensor
    all_tokens: Tensor  # own and tool tokens
    endings: Tensor

    def table(self, task: str, with_tools: bool) -> pd.DataFrame:
        """Returns a row per sample, in the columns of samples.jsonl (docs/evaluate.md)."""
        prompts, samples = self.rewards.shape
        columns = {
            "task": task,
            "problem": torch.arange(prompts).repeat_interleave(samples).numpy(),
            "sample": torch.arange(samples).repeat(prompts).numpy(),
            "reward": self.rewards.flatten().numpy(),
            "ending": [ENDINGS[ending] for ending in self.endings.flatten().tolist()],
            "own_tokens": self.own_tokens.flatten().numpy(),
        }
        if with_tools:
            columns["tool_tokens"] = (self.all_tokens - self.own_tokens).flatten().numpy()
        return pd.DataFrame(columns)


class EvaluatingTrainer(ToolTrainer):
    """A ToolTrainer with `sample_held_out`. Training goes on as if there had been no evaluation."""

    def sample_held_out(self, held_out: HeldOut, samples: int) -> Samples:
        """Draws so many `samples` of every problem of a set, and grades them.

        TRL's rollout code does the work, so that tools and vLLM are served too. The draws are the same at every call.
        vLLM gets all prompts of a process at once: it is kept busy by many, and batches them itself.
        """
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        rows, parts = held_out.rows, []
        prompts_per_batch = max(1, self.args.per_device_eval_batch_size // samples) * processes
        if self.args.use_vllm:  # not a copy of the policy, which sits in vLLM's place
            prompts_per_batch = len(rows)
        with self._evaluating(held_out.reward, samples), isolated_random_state(seed=self.args.seed * 1000 + rank):
            for start in range(0, len(rows), prompts_per_batch):
                batch = rows[start : start + prompts_per_batch]
                padded = batch + [batch[0]] * (-len(batch) % processes)  # whole prompts for every process
                share = len(padded) // processes
                this_process = padded[rank * share : (rank + 1) * share]
                self._generate_and_score_completions([row for row in this_process for _ in range(samples)])
                endings = torch.tensor([[ENDINGS.index(ending)] for ending in self._endings])
                local = torch.cat([self._sampled_tokens, endings.to(self._sampled_tokens)], dim=1)
                counts = self.accelerator.gather(local).view(-1, samples, 3)[: len(batch)]
                rewards = self._summed_rewards().view(-1, samples)[: len(batch)]
                parts.append((rewards, *counts.unbind(-1)))
        return Samples(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))

    @contextmanager
    def _evaluating(self, reward: Callable, samples: int) -> Iterator[None]:
        """Makes TRL only sample and grade, so many `samples` per prompt by `reward`, without what its loss alone reads.

        These are forwards of the policy that sampled, which importance ratios need, and of the reference model.
        """
        options = {"num_generations_eval": samples, "reward_funcs": [reward], "reward_weights": torch.ones(1)}
        options |= {"vllm_importance_sampling_correction": False, "num_iterations": 1, "beta": 0.0}
        before = {name: getattr(self, name) for name in options}
        was_training = self.model.training
        logs_before = copy.deepcopy(self._logs)  # TRL's completions table is that of training
        self.model.eval()
        vars(self).update(options)
        try:
            with torch.no_grad():
                yield
        finally:
            vars(self).update(before)
            self.model.train(was_training)
            self._metrics["eval"].clear()
            self._seconds.clear()
            self._logs = logs_before
