"""Samples rollouts of single prompts with TRL's own rollout code, including tools and sandbox."""

from __future__ import annotations

import torch

from otb.advantages import advantages
from otb.baselines.none import none
from otb.laboratory.scores import Rollout
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.methods import Step
from otb.rollouts import OwnTokens, RolloutGroups
from otb.score_norms import logit_gradient_proxy
from otb.training.trainer import OTBConfig, OTBTrainer


class Sampler:
    """Samples a policy on the prompts of a task.

    task: see `otb.tasks.Task`. environment: makes the environment of one rollout; None for a task without tools.
    options: further fields of OTBConfig, such as rows_per_generation.
    """

    def __init__(self, model, tokenizer, task, environment, temperature: float, folder: str, **options):
        on_gpu = torch.cuda.is_available()
        fields = {
            "output_dir": folder,
            "use_cpu": not on_gpu,
            "bf16": False,
            "gradient_checkpointing": False,
            "num_generations": 1,
            "per_device_train_batch_size": 1,
            "max_completion_length": task.max_completion_length,
            "max_tool_calling_iterations": None if environment is None else task.max_turns - 1,
            "temperature": temperature,
            "report_to": "none",
            "disable_tqdm": True,
        }
        self._trainer = OTBTrainer(
            model,
            task.reward,
            OTBConfig(**fields | options),
            task.train_dataset(),
            processing_class=tokenizer,
            environment_factory=environment,
            baseline=none,
        )
        self._trainer.model.eval()

    def rollouts(self, rows: list[dict], samples: int, seed: int) -> list[list[Rollout]]:
        """Returns `samples` rollouts of each prompt; equal arguments give equal rollouts."""
        output = self._sampled(rows, samples, seed)
        rewards = self._trainer.summed_rewards().tolist()
        ids, attention_mask = prompts_with_responses(output)
        own_mask = torch.cat([torch.zeros_like(output["prompt_mask"]).bool(), response_mask(output)], dim=1)
        kept = attention_mask.bool()
        drawn = [Rollout(ids[i][kept[i]].cpu(), own_mask[i][kept[i]].cpu(), rewards[i]) for i in range(len(rewards))]
        return [drawn[start : start + samples] for start in range(0, len(drawn), samples)]

    def scored(self, rows: list[dict], samples: int, seed: int) -> tuple[Step, list[str]]:
        """Returns `samples` rollouts of each prompt with rewards and score norms, and how each of them ended.

        They are a step under no baseline. One forward pass, without gradient, gives log pi and log sum pi^2.
        """
        output = self._sampled(rows, samples, seed)
        step = Step(output, OwnTokens(response_mask(output)))
        step.log_probs, log_sum_sq_probs = self._trainer.passes.extra(step)
        w = step.own.pack(logit_gradient_proxy(step.log_probs, log_sum_sq_probs))  # (B, T)
        rewards, lengths = self._trainer.summed_rewards(), step.own.lengths
        step.rollouts = RolloutGroups(*(each.unflatten(0, (-1, samples)) for each in (rewards, lengths, w)))
        step.baseline = none(step.rollouts)
        step.advantages = advantages(step.rollouts, step.baseline)
        return step, self._trainer.endings

    def _sampled(self, rows: list[dict], samples: int, seed: int) -> dict:
        torch.manual_seed(seed)
        self._trainer.num_generations_eval = samples
        with torch.no_grad():
            return self._trainer._generate_and_score_completions([row for row in rows for _ in range(samples)])
