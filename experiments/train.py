"""Builds task, policy and trainer from a checked configuration; trains or resumes. Called by experiments/run.py."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import datasets
import huggingface_hub
import torch
import transformers
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed

from experiments import settings
from experiments.environment import describe
from experiments.progress import Progress
from experiments.run_lock import RunLock
from experiments.run_trainer import RESUME_FILES, RunTrainer, Schedule
from otb.errors import RunError
from otb.policies.models import (
    check_lora_targets,
    check_prompt_lengths,
    describe_policy,
    load_model,
    model_facts,
    policy_folder,
)
from otb.records import RunDirectory, write_atomically
from otb.sandbox import Sandbox
from otb.tool_calls import check_tool_template
from otb.trainer import OTBConfig


def train(
    cfg: DictConfig,
    directory: RunDirectory,
    lock: RunLock | None,
    command: list[str],
    progress: Progress,
    sandbox: Sandbox | None,
) -> None:
    """One run from its last complete checkpoint, or from the start, to `cfg.steps`; `directory` is locked and cleared.

    sandbox: of a task with tools. Raises RunError for bad data, a bad model, or a loss that is not finite.
    """
    quiet_libraries()
    make_deterministic(cfg.deterministic)
    inputs = checked_inputs(cfg, sandbox)
    arguments = trainer_config(cfg, inputs.task, directory)
    folder = policy_folder(cfg.model.name, inputs.task, dict(cfg.model.get("warm_start") or {}), progress.warm_start)
    resume_step = step_to_resume(directory)
    if arguments.process_index == 0:
        name_trackers(arguments.report_to, directory)
        note_start(cfg, directory, command, inputs, folder)
        moved = clear_after(directory, resume_step)
        if resume_step:
            progress.note(f"resuming at step {resume_step}" + (f", {moved} later rows discarded" if moved else ""))

    set_seed(cfg.seed)  # LoRA's initial weights
    trainer = RunTrainer(
        load_model(folder, cfg.model.revision, weights_dtype(cfg)),
        inputs.task.reward,
        arguments,
        inputs.train_dataset,
        processing_class=inputs.tokenizer,
        peft_config=inputs.lora,
        environment_factory=inputs.environment,
        baseline=settings.build(cfg, "baseline"),
        directory=directory,
        lock=lock,
        schedule=schedule(cfg),
        evaluation_dataset=inputs.evaluation_dataset,
        on_step=progress.step,
        on_evaluation=progress.evaluation,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every row; `progress` is shown instead
    try:
        if resume_step < cfg.steps:  # else it was killed after its last checkpoint
            trainer.train(resume_from_checkpoint=str(directory.checkpoint(resume_step)) if resume_step else None)
    finally:
        finish_trackers()


class Inputs(NamedTuple):
    """What a run is made of beside its settings and its weights."""

    task: Any
    train_dataset: datasets.Dataset
    evaluation_dataset: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase
    environment: Callable | None
    lora: LoraConfig | None


def checked_inputs(cfg: DictConfig, sandbox: Sandbox | None) -> Inputs:
    """Task, rows, tokenizer and LoRA, checked against each other. Raises RunError; reads no weights."""
    task = settings.build(cfg, "task")
    train_dataset, evaluation_dataset = load_datasets(task, cfg.prompts_per_step)
    tokenizer, model_config = describe_policy(cfg.model.name, cfg.model.revision)
    environment = None if sandbox is None else partial(task.environment, sandbox)
    tools = None if environment is None else [environment().python]
    if tools:
        check_tool_template(tokenizer, cfg.model.name)
    for dataset in (train_dataset, evaluation_dataset):
        lengths = (cfg.max_prompt_length, task.max_completion_length)
        check_prompt_lengths(dataset["prompt"], tokenizer, model_config, *lengths, tools)
    lora = lora_config(cfg)
    if lora is not None:
        check_lora_targets(lora, model_config)
    return Inputs(task, train_dataset, evaluation_dataset, tokenizer, environment, lora)


def note_start(cfg: DictConfig, directory: RunDirectory, command: list[str], inputs: Inputs, folder: str) -> None:
    """Writes environment.json. folder: of the policy."""
    data = provenance(inputs.task, train=inputs.train_dataset, eval=inputs.evaluation_dataset)
    facts = model_facts(folder, cfg.model.revision) | {"data": data}
    write_atomically(directory.environment_file, describe(command, directory, facts))


def clear_after(directory: RunDirectory, step: int) -> int:
    """Makes a directory what it was at the checkpoint of `step`; -> rows moved to discarded.jsonl."""
    moved = directory.discard_after(step)
    directory.prune_checkpoints(RESUME_FILES)  # a kill may have fallen between the last one's rename and this
    return moved


def step_to_resume(directory: RunDirectory) -> int:
    """The step of the last complete checkpoint, 0 without one, as the first process sees it."""
    return broadcast_object_list([max(directory.checkpoint_steps(), default=0)])[0]


def schedule(cfg: DictConfig) -> Schedule:
    return Schedule(
        evaluate_every=cfg.evaluation.every or cfg.steps,
        evaluation_samples=cfg.evaluation.samples,
        checkpoint_every=cfg.checkpoint_every or cfg.steps,
        rollouts_every=cfg.rollouts.every,
        rollouts_groups=cfg.rollouts.groups,
    )


def name_trackers(trackers: list[str], directory: RunDirectory) -> None:
    """Makes a resumed run the same run of the tracker. Set before the trackers start; docs/runs.md, Trackers."""
    if "tensorboard" in trackers:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(directory.path / "tensorboard")
    if "wandb" in trackers:
        os.environ["WANDB_DIR"] = str(directory.path.absolute())
        os.environ["WANDB_RUN_ID"] = directory.run_id()
        os.environ["WANDB_RESUME"] = "allow"


def finish_trackers() -> None:
    """Ends the W&B run: the next run of a sweep may live in this very process, and transformers would log into it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def run_name(trackers: list[str], directory: RunDirectory) -> str:
    """The name at a tracker; trackio knows a run by its name alone, so that it carries the id."""
    name = f"{directory.path.parent.name}/{directory.path.name}"
    return f"{name}-{directory.run_id()}" if "trackio" in trackers else name


def make_deterministic(wanted: bool) -> None:
    """torch's deterministic algorithms where it has them; a CPU run on one thread is deterministic anyway."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.use_deterministic_algorithms(wanted, warn_only=True)


def provenance(task, **datasets) -> dict:
    """Where the rows come from: what the task's `provenance` says, or hashes of the rows of a task that makes them."""
    if hasattr(task, "provenance"):
        return task.provenance()
    return {part: {"rows": len(rows), "rows_sha256": rows_sha256(rows)} for part, rows in datasets.items()}


def rows_sha256(rows) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


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
        "log_level": "error",
        "log_level_replica": "error",
        "log_energy": cfg.log_energy,
        "measure_gradient_noise": cfg.measure_gradient_noise,
        "run_name": run_name(settings.trackers(cfg), directory),
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,  # a loss that is not finite stops the run instead
    }
    derived = {
        "output_dir": str(directory.path),
        "num_generations": cfg.group_size,
        "per_device_train_batch_size": forward,
        # independent of the group size, so that every arm of a comparison draws the same held-out samples
        "per_device_eval_batch_size": max(cfg.evaluation.samples, cfg.model.rollouts_per_forward or 128),
        "gradient_accumulation_steps": rollouts // forward,
        "steps_per_generation": rollouts // forward,
        "max_steps": cfg.steps,
        "seed": cfg.seed,
        "learning_rate": cfg.learning_rate,
        "temperature": cfg.temperature,
        "max_completion_length": task.max_completion_length,
        # the last turn can only answer
        "max_tool_calling_iterations": None if task.environment is None else task.max_turns - 1,
        "bf16": cfg.model.dtype == "bfloat16",
        "fp16": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    given = OmegaConf.to_container(cfg.trainer, resolve=True)
    try:
        return OTBConfig(**(options | given | derived))
    except (TypeError, ValueError) as error:
        raise RunError(f"trainer: {error}") from error


def weights_dtype(cfg: DictConfig) -> str:
    """model.dtype is what the forward computes in. Weights that AdamW trains are float32 beneath it: at a rate of 1e-6
    most updates of a bfloat16 weight would round to nothing. Under LoRA the frozen weights need no such precision.
    """
    return cfg.model.dtype if cfg.model.get("lora") else "float32"


def lora_config(cfg: DictConfig) -> LoraConfig | None:
    """None where `model.lora` is empty. Raises RunError for what peft refuses."""
    fields = OmegaConf.to_container(cfg.model, resolve=True).get("lora")
    if not fields:
        return None
    try:
        return LoraConfig(**({"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | fields))
    except (TypeError, ValueError) as error:
        raise RunError(f"model.lora: {error}") from error


def quiet_libraries() -> None:
    """What the libraries say at start-up is neither progress nor a problem of the run."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*experimental feature.*")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
