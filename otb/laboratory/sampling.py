"""Samples rollouts of single prompts with TRL's own rollout code, including tools and sandbox."""

from __future__ import annotations

import torch

from otb.baselines.none import none
from otb.laboratory.scores import Rollout
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.training.trainer import OTBConfig, OTBTrainer


class Sampler:
    """Samples a policy on the prompts of a task.

    task: see `otb.tasks.Task`. environment: makes the environment of one rollout; None for a task without tools.
    """

    def __init__(self, model, tokenizer, task, environment, temperature: float, folder: str):
        on_gpu = torch.cuda.is_available()
        arguments = OTBConfig(
            output_dir=folder,
            use_cpu=not on_gpu,
            bf16=False,
            gradient_checkpointing=False,
            num_generations=1,
            per_device_train_batch_size=1,
            max_completion_length=task.max_completion_length,
            max_tool_calling_iterations=None if environment is None else task.max_turns - 1,
            temperature=temperature,
            report_to="none",
            disable_tqdm=True,
        )
        self._trainer = OTBTrainer(
            model,
            task.reward,
            arguments,
            task.train_dataset(),
            processing_class=tokenizer,
            environment_factory=environment,
            baseline=none,
        )
        self._trainer.model.eval()

    def rollouts(self, rows: list[dict], samples: int, seed: int) -> list[list[Rollout]]:
        """Returns `samples` rollouts of each prompt; equal arguments give equal rollouts."""
        torch.manual_seed(seed)
        self._trainer.num_generations_eval = samples
        with torch.no_grad():
            output = self._trainer._generate_and_score_completions([row for row in rows for _ in range(samples)])
        rewards = self._trainer.summed_rewards().tolist()
        ids, attention_mask = prompts_with_responses(output)
        own_mask = torch.cat([torch.zeros_like(output["prompt_mask"]).bool(), response_mask(output)], dim=1)
        kept = attention_mask.bool()
        drawn = [Rollout(ids[i][kept[i]].cpu(), own_mask[i][kept[i]].cpu(), rewards[i]) for i in range(len(rewards))]
        return [drawn[start : start + samples] for start in range(0, len(drawn), samples)]
