"""Builds task, policy and trainer from a checked configuration; trains or resumes. Called by experiments/run.py."""

from __future__ import annotations

import json
import logging
import os
import warnings

import huggingface_hub
import torch
import transformers
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from transformers.trainer_utils import set_seed

from experiments.environment import describe
from experiments.progress import Progress
from otb.models import TINY, load_model, load_tokenizer, model_facts, policy_folder
from otb.records import RunDirectory, RunError, read_rows, write_atomically
from otb.run_lock import RunLock
from otb.run_trainer import RunTrainer, Schedule
from otb.trainer import OTBConfig


def train(
    cfg: DictConfig, directory: RunDirectory, lock: RunLock | None, command: list[str], progress: Progress
) -> None:
    """One run from its last complete checkpoint, or from the start, to `cfg.steps`; `directory` is locked and cleared.

    Raises RunError for bad data, a bad model, or a loss that is not finite.
    """
    quiet_libraries()
    torch.use_deterministic_algorithms(cfg.deterministic)
    is_main = int(os.environ.get("RANK", 0)) == 0
    task = instantiate(cfg.task, _convert_="object")
    train_dataset, evaluation_dataset = load_datasets(task, cfg.prompts_per_step)

    folder = policy_folder(cfg.model.name, task, dict(cfg.model.get("warm_start") or {}), progress.warm_start)
    tokenizer = load_tokenizer(folder, cfg.model.revision)
    lora = dict(cfg.model.get("lora") or {})
    steps = directory.checkpoint_steps()
    resume = directory.checkpoint(steps[-1]) if steps else None
    if is_main:
        data = task.provenance() if hasattr(task, "provenance") else {"dataset": task.name, "embedded": True}
        environment = describe(command, directory.path) | model_facts(folder, cfg.model.revision) | {"data": data}
        write_atomically(directory.environment_file, json.dumps(environment, indent=1, default=str) + "\n")
        moved = directory.discard_after(steps[-1] if steps else 0)
        progress.note(f"resuming at step {steps[-1]}, {moved} later rows discarded" if resume else "")

    set_seed(cfg.seed)  # LoRA's initial weights
    model = load_model(folder, cfg.model.revision, cfg.model.dtype)
    trainer = RunTrainer(
        model,
        task.reward,
        trainer_config(cfg, task, directory),
        train_dataset,
        processing_class=tokenizer,
        peft_config=lora_config(lora) if lora else None,
        environment_factory=task.environment,
        baseline=instantiate(cfg.baseline),
        directory=directory,
        lock=lock,
        schedule=Schedule(
            evaluate_every=cfg.evaluation.every or cfg.steps,
            evaluation_samples=cfg.evaluation.samples,
            checkpoint_every=cfg.checkpoint_every or cfg.steps,
            rollouts_every=cfg.rollouts.every,
            rollouts_groups=cfg.rollouts.groups,
        ),
        evaluation_dataset=evaluation_dataset,
        on_step=progress.step,
        on_evaluation=progress.evaluation,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every row; `progress` is shown instead
    if not any(read_rows(directory.evaluations_file)):
        trainer.evaluate_held_out()
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if is_main:
        directory.write_status("finished", step=trainer.state.global_step, steps=cfg.steps)


def load_datasets(task, prompts_per_step: int):
    """Training and evaluation rows; every problem with them is a RunError before a model is loaded."""
    try:
        train_dataset, evaluation_dataset = task.train_dataset(), task.eval_dataset()
    except (ValueError, FileNotFoundError) as error:
        raise RunError(str(error)) from error
    if len(train_dataset) < prompts_per_step:
        raise RunError(
            f"prompts_per_step={prompts_per_step} is more than the {len(train_dataset)} training prompts of "
            f"{task.name}. Try prompts_per_step={len(train_dataset)}."
        )
    return train_dataset, evaluation_dataset


def trainer_config(cfg: DictConfig, task, directory: RunDirectory) -> OTBConfig:
    """trl.GRPOConfig from the run's keys; `trainer.*` is passed on verbatim."""
    rollouts = cfg.prompts_per_step * cfg.group_size // int(os.environ.get("WORLD_SIZE", 1))
    forward = min(cfg.model.rollouts_per_forward or rollouts, rollouts)
    on_gpu = torch.cuda.is_available() and not cfg.trainer.get("use_cpu", False)
    options = {
        "use_cpu": not on_gpu,
        "gradient_checkpointing": on_gpu,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "log_energy": cfg.log_energy,
        "run_name": directory.path.name,
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,  # a loss that is not finite stops the run instead
    }
    derived = {
        "output_dir": str(directory.path),
        "num_generations": cfg.group_size,
        "per_device_train_batch_size": forward,
        "per_device_eval_batch_size": max(forward, cfg.evaluation.samples, 64 if cfg.model.name == TINY else 0),
        "gradient_accumulation_steps": rollouts // forward,
        "steps_per_generation": rollouts // forward,
        "max_steps": cfg.steps,
        "seed": cfg.seed,
        "learning_rate": cfg.learning_rate,
        "temperature": cfg.temperature,
        "max_completion_length": task.max_completion_length,
        "bf16": cfg.model.dtype == "bfloat16",
        "fp16": cfg.model.dtype == "float16",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    given = OmegaConf.to_container(cfg.trainer, resolve=True)
    try:
        return OTBConfig(**(options | given | derived))
    except (TypeError, ValueError) as error:
        raise RunError(f"trainer: {error}") from error


def lora_config(fields: dict) -> LoraConfig:
    return LoraConfig(**({"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | fields))


def quiet_libraries() -> None:
    """What the libraries say at start-up is neither progress nor a problem of the run."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*experimental feature.*")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
