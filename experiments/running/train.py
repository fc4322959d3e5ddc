"""Builds task, policy and trainer from a checked configuration; trains or resumes. Called by experiments/run.py."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import huggingface_hub
import torch
import transformers
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed

from experiments.running import trackers
from experiments.running.build import build, is_off, methods
from experiments.running.data import Rows, load_rows, provenance, told_by_the_first
from experiments.running.environment import describe, other_threads
from experiments.running.hardware import emulated_bfloat16, grpo_options, sampling_limits, source_of
from experiments.running.progress import Progress
from experiments.running.run_lock import RunLock
from experiments.running.run_trainer import RESUME_FILES, RunTrainer, Schedule
from experiments.running.threads import use_threads
from otb.errors import RunError
from otb.files import write_atomically
from otb.methods.auxiliary import refuse_architecture
from otb.methods.tool_calls import check_tool_template
from otb.policies.folders import ADAPTER
from otb.policies.models import (
    WEIGHT_FILES,
    check_lora_targets,
    check_prompt_lengths,
    check_shipped_head,
    describe_policy,
    load_model,
    model_facts,
    policy_folder,
)
from otb.records import RunDirectory
from otb.sandbox import Sandbox
from otb.training.options import batches
from otb.training.trainer import OTBConfig


def train(
    cfg: DictConfig,
    directory: RunDirectory,
    lock: RunLock | None,
    command: list[str],
    progress: Progress,
    sandbox: Sandbox | None,
) -> None:
    """Trains from the last complete checkpoint, or from the start, to `cfg.steps`.

    directory: locked, and cleared of what a killed process left half-written. sandbox: of a task with tools.
    Raises RunError for bad data, a bad model, or a loss that is not finite.
    """
    quiet_libraries()
    make_deterministic(cfg.deterministic)
    make_weights_folder(cfg, progress.warm_start)
    arguments = trainer_config(cfg, directory)  # starts the process group of a run of several
    inputs = checked_inputs(cfg, sandbox)
    add_limits(arguments, cfg, inputs)
    folder = weights_folder(cfg, inputs.task, progress.warm_start)
    resume_step = step_to_resume(directory)
    progress.note(emulated_bfloat16(cfg.model.dtype, arguments.use_cpu))
    if arguments.process_index == 0:
        progress.note("\n".join(inputs.rows.notes))
        trackers.prepare(arguments.report_to, directory)
        threads_changed = other_threads(directory)
        note_start(cfg, directory, command, inputs, folder)
        moved = clear_after(directory, resume_step)
        if resume_step:
            progress.note(f"resuming at step {resume_step}" + (f", {moved} later rows discarded" if moved else ""))
            if arguments.device.type == "cpu":
                progress.note(threads_changed)
    trainer = build_trainer(cfg, inputs, arguments, folder, directory, lock, progress)
    try:
        if resume_step < cfg.steps:  # else it was killed after its last checkpoint
            trainer.train(resume_from_checkpoint=str(directory.checkpoint(resume_step)) if resume_step else None)
    finally:
        trackers.finish()


def build_trainer(
    cfg: DictConfig,
    inputs: Inputs,
    arguments: OTBConfig,
    folder: str,
    directory: RunDirectory,
    lock: RunLock | None,
    progress: Progress,
) -> RunTrainer:
    """Loads the weights from `folder` and puts everything together. Raises RunError where they cannot be loaded."""
    set_seed(cfg.seed)  # LoRA's initial weights
    source, attention = source_of(cfg, folder), cfg.model.get("attn_implementation")
    model = load_model(source, cfg.model.revision, weights_dtype(cfg), attention)
    try:
        trainer = _trainer(cfg, model, inputs, arguments, directory, lock, progress)
    except (ImportError, ValueError, OSError) as error:  # what TRL and vLLM refuse; a server that is gone
        lines = str(error).strip().splitlines() or [""]
        raise RunError(f"the trainer cannot be built: {type(error).__name__}: {' '.join(lines[:3])}") from error
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        adapter.base_model_name_or_path = folder  # not a copy on this machine
        adapter.revision = None if Path(folder).is_dir() else cfg.model.revision
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every row; `progress` is shown instead
    return trainer


def _trainer(
    cfg: DictConfig,
    model: PreTrainedModel,
    inputs: Inputs,
    arguments: OTBConfig,
    directory: RunDirectory,
    lock: RunLock | None,
    progress: Progress,
) -> RunTrainer:
    return RunTrainer(
        model,
        inputs.task.reward,
        arguments,
        inputs.rows.train,
        processing_class=inputs.tokenizer,
        peft_config=inputs.lora,
        environment_factory=inputs.environment,
        baseline=build(cfg, "baseline"),
        **methods(cfg),
        directory=directory,
        lock=lock,
        schedule=schedule(cfg),
        held_out=inputs.rows.held_out,
        on_step=progress.step,
        on_evaluation=progress.evaluation,
    )


def wait_for_all_processes() -> None:
    """Returns when every process of the run has called it, and ends their group. Nothing happens in a run of one."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class Inputs(NamedTuple):
    """What a run is made of beside its configuration and its weights."""

    task: Any
    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    environment: Callable | None
    lora: LoraConfig | None
    longest_prompt: int  # tokens at the most


def checked_inputs(cfg: DictConfig, sandbox: Sandbox | None) -> Inputs:
    """Builds task, rows, tokenizer and LoRA, and checks them against each other. Raises RunError; reads no weights.

    Rows are checked by the first process alone; the others read them when it is done, from the caches that it made.
    """
    task = build(cfg, "task")
    tokenizer, model_config = described(cfg)
    if "threads" in cfg:  # else it has processes of its own (experiments/measuring/laboratory.py)
        use_threads(cfg.threads, model_config)
    environment = None if sandbox is None else partial(task.environment, sandbox)
    tools = None if environment is None else [environment().python]
    if tools:
        check_tool_template(tokenizer, cfg.model.name)
    limits = (cfg.max_prompt_length, task.max_completion_length)
    rows = cache(partial(load_rows, cfg, task))

    def longest_prompt() -> int:
        prompts = [rows().train["prompt"], *([row["prompt"] for row in held_out.rows] for held_out in rows().held_out)]
        return max(check_prompt_lengths(some, tokenizer, model_config, *limits, tools) for some in prompts)

    longest = told_by_the_first(longest_prompt)
    if not is_off(cfg, "auxiliary"):
        refuse_head_of(cfg, model_config)
    lora = lora_config(cfg)
    if lora is not None:
        check_lora_targets(lora, model_config)
    return Inputs(task, rows(), tokenizer, environment, lora, longest)


def refuse_head_of(cfg: DictConfig, model_config: PreTrainedConfig) -> None:
    """Raises RunError for a model that no auxiliary head has been built for, or that ships none where it should."""
    try:
        refuse_architecture(model_config.model_type)
    except ValueError as error:
        raise RunError(str(error)) from error
    if cfg.auxiliary.weights == "shipped":
        check_shipped_head(cfg.model.name, cfg.model.revision)


def described(cfg: DictConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Returns tokenizer and configuration of the policy in `cfg.model`, by `describe_policy`."""
    model = cfg.model
    return describe_policy(model.name, model.revision, model.get("chat_template"), model.get("gguf_file"))


def weights_folder(cfg: DictConfig, task, progress: Callable[[int, int, float], None]) -> str:
    """Returns folder or hub id of the weights of `cfg.model`, by `policy_folder`. progress: of the tiny warm start."""
    model = cfg.model
    recipe = dict(model.get("warm_start") or {})
    return policy_folder(model.name, task, recipe, progress, model.revision, model.get("gguf_file"))


def make_weights_folder(cfg: DictConfig, progress: Callable[[int, int, float], None]) -> None:
    """Makes the folder of weights for several processes, before the trainer's options make them a group.

    In a group transformers writes a model on the first process alone, and under ZeRO-3 and FSDP it loads one in parts,
    all processes at once. The one that holds the folder's lock would write half of it, or wait for the others for ever.
    """
    if "WORLD_SIZE" in os.environ:
        weights_folder(cfg, build(cfg, "task"), progress)


def base_and_adapter(
    cfg: DictConfig, task, checkpoint: Path | None, progress: Callable[[int, int, float], None]
) -> tuple[str, str | None]:
    """Returns folder or hub id of the whole policy, and the folder of the LoRA adapter on top of it or None.

    checkpoint: a folder with either; None for the weights of `cfg.model`. Raises RunError where it holds neither.
    """
    if checkpoint is None or (checkpoint / ADAPTER).exists():
        base = weights_folder(cfg, task, progress)
        return base, None if checkpoint is None else str(checkpoint)
    if not any(file for pattern in WEIGHT_FILES for file in checkpoint.glob(pattern)):
        raise RunError(
            f"{checkpoint} holds no weights that transformers can load ({', '.join(WEIGHT_FILES)}). Give a checkpoint "
            "with the whole policy or an adapter; the parts of a sharded one have to be put together first."
        )
    return str(checkpoint), None


def note_start(cfg: DictConfig, directory: RunDirectory, command: list[str], inputs: Inputs, folder: str) -> None:
    """Writes environment.json. folder: where the policy's weights are."""
    facts = model_facts(folder, cfg.model.revision) | {"data": provenance(cfg, inputs.task, inputs.rows)}
    write_atomically(directory.environment_file, describe(command, directory, facts))


def clear_after(directory: RunDirectory, step: int) -> int:
    """Makes a directory what it was at the checkpoint of `step`. Returns how many rows went to discarded.jsonl."""
    moved = directory.discard_after(step)
    directory.prune_checkpoints(RESUME_FILES)  # a kill may have fallen between the last one's rename and this
    return moved


def step_to_resume(directory: RunDirectory) -> int:
    """Returns the step of the last complete checkpoint, 0 without one, as the first process sees it."""
    return broadcast_object_list([max(directory.checkpoint_steps(), default=0)])[0]


def schedule(cfg: DictConfig) -> Schedule:
    """Returns when to evaluate, to keep samples and to write checkpoints; every 0 falls on the last step alone."""
    return Schedule(
        evaluate_every=cfg.evaluation.every or cfg.steps,
        evaluation_samples=cfg.evaluation.samples,
        checkpoint_every=cfg.checkpoint_every or cfg.steps,
        rollouts_every=cfg.rollouts.every,
        rollouts_groups=cfg.rollouts.groups,
    )


def make_deterministic(deterministic: bool) -> None:
    """Turns torch's deterministic algorithms on or off; a CPU run on one thread is deterministic anyway."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def trainer_config(cfg: DictConfig, directory: RunDirectory) -> OTBConfig:
    """Returns the GRPOConfig of a run. Its keys win over `trainer.*`, which wins over our defaults. Raises RunError.

    It knows nothing of the rows yet: `add_limits` does.
    """
    options = default_options(cfg, directory) | OmegaConf.to_container(cfg.trainer, resolve=True)
    options |= grpo_options(cfg)
    try:
        return OTBConfig(**(options | derived_options(cfg, build(cfg, "task"), directory)))
    except (TypeError, ValueError) as error:
        raise RunError(f"trainer: {error}") from error


def add_limits(arguments: OTBConfig, cfg: DictConfig, inputs: Inputs) -> None:
    """Puts in what follows from rows and tokenizer: vLLM's context, and the tokens that end a rollout there."""
    limits = sampling_limits(cfg, inputs.longest_prompt, [inputs.tokenizer.eos_token_id])
    for name, value in limits.items():
        setattr(arguments, name, value)


def default_options(cfg: DictConfig, directory: RunDirectory) -> dict[str, Any]:
    """Returns the options of GRPOConfig whose defaults are other ones here; `trainer.KEY=` may change them."""
    on_gpu = torch.cuda.is_available() and not cfg.trainer.get("use_cpu", False)
    return {
        "use_cpu": not on_gpu,
        "gradient_checkpointing": on_gpu,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "log_level": "error",
        "log_level_replica": "error",
        "log_energy": cfg.log_energy,
        "lean_steps": cfg.lean_steps,
        "measure_gradient_noise": cfg.measure_gradient_noise,
        "run_name": trackers.run_name(trackers.chosen(cfg), directory),
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,  # a loss that is not finite stops the run instead
    }


def derived_options(cfg: DictConfig, task, directory: RunDirectory) -> dict[str, Any]:
    """Returns the options of GRPOConfig that follow from the run's keys; `trainer.*` may not set them."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    step = batches(cfg.prompts_per_step, cfg.group_size, processes, cfg.model.rollouts_per_forward)
    return {
        "output_dir": str(directory.path),
        "num_generations": cfg.group_size,
        "per_device_train_batch_size": step.forward,
        # independent of the group size, so that every arm of a comparison draws the same held-out samples
        "per_device_eval_batch_size": max(cfg.evaluation.samples, cfg.model.rollouts_per_forward or 128),
        "gradient_accumulation_steps": step.accumulation,
        "steps_per_generation": step.accumulation,
        "max_steps": cfg.steps,
        "seed": cfg.seed,
        "learning_rate": cfg.learning_rate,
        "temperature": cfg.temperature,
        "rows_per_generation": cfg.rollouts_by.get("rows"),
        "geometric_ratio_band": None if cfg.geometric_ratio_band is None else tuple(cfg.geometric_ratio_band),
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


def weights_dtype(cfg: DictConfig) -> str:
    """Returns the dtype to load the weights in; model.dtype is what the forward computes in.

    Weights that AdamW trains are float32: at a rate of 1e-6 most updates of a bfloat16 weight would round to nothing.
    Under LoRA the frozen weights need no such precision.
    """
    return cfg.model.dtype if cfg.model.get("lora") else "float32"


def lora_config(cfg: DictConfig) -> LoraConfig | None:
    """Returns the configuration of LoRA, None where `model.lora` is empty. Raises RunError for what peft refuses."""
    fields = OmegaConf.to_container(cfg.model, resolve=True).get("lora")
    if not fields:
        return None
    try:
        return LoraConfig(**({"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | fields))
    except (TypeError, ValueError) as error:
        raise RunError(f"model.lora: {error}") from error


def quiet_libraries() -> None:
    """Silences what the libraries say at start-up: it is neither progress nor a problem of the run."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*experimental feature.*")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
