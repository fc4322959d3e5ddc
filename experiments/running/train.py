"""Builds policy and trainer of a checked run; trains or resumes. Called by experiments/run.py."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
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
from experiments.running.build import Run, is_off
from experiments.running.data import Rows, load_rows, provenance, told_by_the_first
from experiments.running.devices import emulated_bfloat16
from experiments.running.environment import describe, other_threads
from experiments.running.grpo_options import derived_options, machine_options, sampling_limits
from experiments.running.policy import (
    described,
    lora_config,
    make_weights_folder,
    source_of,
    weights_dtype,
    weights_folder,
)
from experiments.running.progress import Progress
from experiments.running.run_lock import RunLock
from experiments.running.run_trainer import RESUME_FILES, RunTrainer, Schedule
from experiments.running.threads import use_threads
from otb.errors import RunError
from otb.files import write_atomically
from otb.methods.auxiliary import refuse_architecture
from otb.methods.tool_calls import check_tool_template
from otb.policies.models import (
    check_lora_targets,
    check_prompt_lengths,
    check_shipped_head,
    load_model,
    model_facts,
)
from otb.records import RunDirectory
from otb.sandbox import Sandbox
from otb.tasks import Task
from otb.training.trainer import OTBConfig


def train(
    run: Run,
    directory: RunDirectory,
    lock: RunLock | None,
    command: list[str],
    progress: Progress,
) -> None:
    """Trains from the last complete checkpoint, or from the start, to `steps`.

    directory: locked, and cleared of what a killed process left half-written.
    Raises RunError for bad data, a bad model, or a loss that is not finite.
    """
    cfg = run.cfg
    quiet_libraries()
    make_deterministic(cfg.deterministic)
    make_weights_folder(cfg, run.task, progress.warm_start)
    arguments = trainer_config(run, directory)  # starts the process group of a run of several
    inputs = checked_inputs(cfg, run.task, run.sandbox, run.held_out)
    add_limits(arguments, cfg, inputs)
    folder = weights_folder(cfg, run.task, progress.warm_start)
    resume_step = step_to_resume(directory)
    progress.note(emulated_bfloat16(cfg.model.dtype, arguments.use_cpu))
    if arguments.process_index == 0:
        progress.note("\n".join(inputs.rows.notes))
        trackers.prepare(arguments.report_to, directory)
        threads_changed = other_threads(directory)
        note_start(run, directory, command, inputs.rows, folder)
        moved = clear_after(directory, resume_step)
        if resume_step:
            progress.note(f"resuming at step {resume_step}" + (f", {moved} later rows discarded" if moved else ""))
            if arguments.device.type == "cpu":
                progress.note(threads_changed)
    trainer = build_trainer(run, inputs, arguments, folder, directory, lock, progress)
    try:
        if resume_step < cfg.steps:  # else it was killed after its last checkpoint
            trainer.train(resume_from_checkpoint=str(directory.checkpoint(resume_step)) if resume_step else None)
    finally:
        trackers.finish()


def build_trainer(
    run: Run,
    inputs: Inputs,
    arguments: OTBConfig,
    folder: str,
    directory: RunDirectory,
    lock: RunLock | None,
    progress: Progress,
) -> RunTrainer:
    """Loads the weights from `folder` and puts everything together. Raises RunError where they cannot be loaded."""
    cfg = run.cfg
    set_seed(cfg.seed)  # LoRA's initial weights
    source, attention = source_of(cfg, folder), cfg.model.get("attn_implementation")
    model = load_model(source, cfg.model.revision, weights_dtype(cfg), attention)
    try:
        trainer = _trainer(run, model, inputs, arguments, directory, lock, progress)
    except (ImportError, ValueError, OSError) as error:  # what TRL and vLLM refuse; a server that is gone
        lines = str(error).strip().splitlines() or [""]
        raise RunError(f"the trainer cannot be built: {type(error).__name__}: {' '.join(lines[:3])}") from error
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        adapter.base_model_name_or_path = folder  # not a copy on this machine
        adapter.revision = None if Path(folder).is_dir() else cfg.model.revision
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every row; `progress` is shown instead
    return trainer


def _trainer(
    run: Run,
    model: PreTrainedModel,
    inputs: Inputs,
    arguments: OTBConfig,
    directory: RunDirectory,
    lock: RunLock | None,
    progress: Progress,
) -> RunTrainer:
    return RunTrainer(
        model,
        run.task.reward,
        arguments,
        inputs.rows.train,
        processing_class=inputs.tokenizer,
        peft_config=inputs.lora,
        environment_factory=inputs.environment,
        baseline=run.baseline,
        **run.methods,
        directory=directory,
        lock=lock,
        schedule=schedule(run.cfg),
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
    """A task, and what a command reads beside weights."""

    task: Task
    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    environment: Callable | None
    lora: LoraConfig | None
    longest_prompt: int  # tokens at the most


def checked_inputs(
    cfg: DictConfig, task: Task, sandbox: Sandbox | None, held_out: Mapping[str, Task] | None = None
) -> Inputs:
    """Reads rows and tokenizer, and checks them against each other and LoRA. Raises RunError; reads no weights.

    held_out: further tasks to evaluate on, by name. The first process checks the rows; the others read them when it is
    done, from the caches that it made.
    """
    tokenizer, model_config = described(cfg)
    if "threads" in cfg:  # else it has processes of its own (experiments/measuring/laboratory.py)
        use_threads(cfg.threads, model_config)
    environment = None if sandbox is None else partial(task.environment, sandbox)
    tools = None if environment is None else [environment().python]
    if tools:
        check_tool_template(tokenizer, cfg.model.name)
    limits = (cfg.max_prompt_length, task.max_completion_length)
    rows = cache(partial(load_rows, cfg, task, held_out))

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


def note_start(run: Run, directory: RunDirectory, command: list[str], rows: Rows, folder: str) -> None:
    """Writes environment.json. folder: where the policy's weights are."""
    facts = model_facts(folder, run.cfg.model.revision) | {"data": provenance(run.task, run.held_out, rows)}
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


def trainer_config(run: Run, directory: RunDirectory) -> OTBConfig:
    """Returns the GRPOConfig of a run. Its keys win over `trainer.*`, which wins over our defaults. Raises RunError.

    It does not know the rows yet: `add_limits` does.
    """
    options = default_options(run.cfg, directory) | OmegaConf.to_container(run.cfg.trainer, resolve=True)
    options |= machine_options(run.cfg) | derived_options(run) | {"output_dir": str(directory.path)}
    try:
        return OTBConfig(**options)
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
        "run_name": trackers.run_name(trackers.chosen(cfg), directory),
        "dataloader_pin_memory": on_gpu,
        "logging_nan_inf_filter": False,  # a loss that is not finite stops the run instead
    }


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
