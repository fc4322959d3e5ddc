"""HeldOutSampler: samples and grades held-out problems in the middle of training. RunTrainer calls it."""

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


class HeldOutSampler:
    """Samples and grades held-out problems between the steps of a trainer, which then trains on as if it had not."""

    def __init__(self, trainer: OTBTrainer):
        self.trainer: Any = trainer

    def samples(self, held_out: HeldOut, samples: int) -> Samples:
        """Draws so many `samples` of every problem of a set, and grades them.

        TRL's rollout code does the work, so that tools and vLLM are served as well. The draws are the same at every
        call. vLLM gets all prompts of a process at once: it is kept busy by many, and batches them itself.
        """
        trainer = self.trainer
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        rows, parts = held_out.rows, []
        prompts_per_batch = max(1, trainer.args.per_device_eval_batch_size // samples) * processes
        if trainer.args.use_vllm:  # the real one, not a copy of the policy
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
        """Makes TRL only sample, `samples` responses per prompt, and grade them by `reward`.

        It leaves out the forwards that its loss alone reads: of the policy that sampled, for importance ratios, and of
        the reference model.
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
