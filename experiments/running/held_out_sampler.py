"""Samples and grades held-out problems during training. RunTrainer uses HeldOutSampler for its evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from experiments.running.held_out import HeldOut
from otb.methods.tool_rollouts import ENDINGS
from otb.random_state import isolated_random_state
from otb.training.trainer import OTBTrainer


class Samples(NamedTuple):
    """Holds the samples of a set; each field is (prompts, samples).

    rewards: NaN for unscored samples. endings: positions in ENDINGS.
    """

    rewards: Tensor
    own_tokens: Tensor
    all_tokens: Tensor  # own and tool tokens
    endings: Tensor

    def table(self, task: str, with_tools: bool) -> pd.DataFrame:
        """Returns a row per sample, with the columns of samples.jsonl (docs/evaluate.md)."""
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


class HeldOutSampler:
    """Samples and grades held-out problems between the steps of a trainer, without any effect on training."""

    def __init__(self, trainer: OTBTrainer):
        self.trainer: Any = trainer

    def samples(self, held_out: HeldOut, samples: int) -> Samples:
        """Draws and grades `samples` responses to every problem of a set.

        TRL's rollout code samples them, so tools and vLLM work as in training. Every call uses the same random state.
        vLLM gets all prompts of a process at once, because it batches them itself and needs many to be busy.
        """
        trainer = self.trainer
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        rows, parts = held_out.rows, []
        prompts_per_batch = max(1, trainer.args.per_device_eval_batch_size // samples) * processes
        if trainer.args.use_vllm:  # unlike trainer.use_vllm, not true for a SamplerCopy
            prompts_per_batch = len(rows)
        with self.evaluating(held_out.reward, samples), isolated_random_state(seed=trainer.args.seed * 1000 + rank):
            for start in range(0, len(rows), prompts_per_batch):
                batch = rows[start : start + prompts_per_batch]
                padded = batch + [batch[0]] * (-len(batch) % processes)  # whole prompts for every process
                share = len(padded) // processes
                this_process = padded[rank * share : (rank + 1) * share]
                trainer._generate_and_score_completions([row for row in this_process for _ in range(samples)])
                endings = torch.tensor([[ENDINGS.index(ending)] for ending in trainer.endings])
                local = torch.cat([trainer.sampled_tokens, endings.to(trainer.sampled_tokens)], dim=1)
                counts = trainer.accelerator.gather(local).view(-1, samples, 3)[: len(batch)]
                rewards = trainer.summed_rewards().view(-1, samples)[: len(batch)]
                parts.append((rewards, *counts.unbind(-1)))
        return Samples(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))

    @contextmanager
    def evaluating(self, reward: Callable, samples: int) -> Iterator[None]:
        """Makes TRL sample `samples` responses per prompt and grade them with `reward`, inside the block.

        TRL then skips the forwards of the policy that sampled and of the reference model, which only its loss needs.
        """
        trainer = self.trainer
        options = {"num_generations_eval": samples, "reward_funcs": [reward], "reward_weights": torch.ones(1)}
        options |= {"vllm_importance_sampling_correction": False, "num_iterations": 1, "beta": 0.0}
        before = {name: getattr(trainer, name) for name in options}
        was_training = trainer.model.training
        logs_before = copy.deepcopy(trainer._logs)  # TRL's completions table belongs to training
        trainer.model.eval()
        vars(trainer).update(options)
        try:
            with torch.no_grad():
                yield
        finally:
            vars(trainer).update(before)
            trainer.model.train(was_training)
            trainer._metrics["eval"].clear()
            trainer.seconds.clear()
            trainer._logs = logs_before
