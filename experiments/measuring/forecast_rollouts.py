"""Samples rollouts of a policy with their score norms, a parquet file per prompt. Called by experiments/forecast.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from experiments.measuring.forecasting import missing, rollouts_file
from experiments.running.grpo_options import RunOptions
from experiments.running.policy import base_and_adapter
from experiments.running.progress import Progress
from experiments.running.rollout_rows import rollout_rows, write_parquet
from experiments.running.train import checked_inputs, quiet_libraries
from otb.errors import RunError
from otb.files import write_atomically
from otb.laboratory.sampling import Sampler
from otb.laboratory.workers import load_policy
from otb.sandbox import Sandbox
from otb.tasks import Task
from otb.training.options import refuse_generation_config


class SamplingProgress(Progress):
    """Shows progress over the prompts."""

    def prompt(self, done: int, rewards) -> None:
        """Shows that `done` prompts are sampled. rewards (1, M): of the newest."""
        self._advance("sampling", done, self.steps, f"reward {float(rewards.nanmean()):.2f}")


def sample(cfg: DictConfig, task: Task, sandbox: Sandbox | None, folder: Path) -> None:
    """Writes the files of the prompts that `folder` lacks. Raises RunError.

    A prompt's rollouts depend on the seed and its number alone, so a resumed command draws what it would have drawn.
    """
    quiet_libraries()
    inputs = checked_inputs(cfg, task, sandbox)
    if cfg.prompts > len(inputs.rows.train):
        available = len(inputs.rows.train)
        raise RunError(f"prompts={cfg.prompts} are more than the task's {available} rows. Try prompts={available}.")
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    with SamplingProgress(cfg.prompts) as progress:
        sampler = _sampler(cfg, inputs, folder, progress)
        (folder / "rollouts").mkdir(exist_ok=True)
        for index in missing(cfg, folder):
            step, endings = sampler.scored([inputs.rows.train[index]], cfg.rollouts, cfg.seed * 1_000_000 + index)
            rows = rollout_rows(step, endings, inputs.tokenizer, None, 0)
            write_parquet(pd.DataFrame(row | {"prompt": index} for row in rows), rollouts_file(cfg, folder, index))
            progress.prompt(index + 1, step.rollouts.rewards)


def _sampler(cfg: DictConfig, inputs, folder: Path, progress: Progress) -> Sampler:
    """Loads the policy; a fresh LoRA adapter changes no probability and is left out."""
    checkpoint = None if cfg.checkpoint is None else Path(cfg.checkpoint).expanduser().resolve()
    base, adapter = base_and_adapter(cfg, inputs.task, checkpoint, progress.warm_start)
    model = load_policy(base, cfg.model.revision, adapter, cfg.model.dtype)
    try:
        refuse_generation_config(RunOptions(log_energy=True), model.generation_config.to_dict())
    except ValueError as error:
        raise RunError(str(error)) from error
    make = partial(Sampler, model, inputs.tokenizer, inputs.task, inputs.environment, cfg.temperature, str(folder))
    forward = cfg.model.rollouts_per_forward or cfg.rollouts
    return make(per_device_train_batch_size=forward, rows_per_generation=cfg.rollouts_by.rows)
