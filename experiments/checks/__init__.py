"""Checks of a composed configuration, before anything heavy is imported: a refusal answers in a third of a second.

Importing torch takes 3 s and TRL 8 s, and neither a wrong key on a login node nor one in 200 runs of a sweep should
cost that. This is why everything that reads a configuration does without them: types of tensors stand under
TYPE_CHECKING, baselines import torch inside their functions, the options of GRPOConfig are read from its source file
(fields.py), and run.py imports train.py last. tests/promises/test_architecture.py lists the modules that must stay
light.

Called by experiments/run.py, experiments/variance.py, and for every run of a sweep by experiments/sweeps/runs_of.py.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from experiments.checks.choices import check_keys_of_choice
from experiments.checks.files import check_training_rows
from experiments.checks.methods import check_methods
from experiments.checks.model import check_model
from experiments.checks.target import check_target
from experiments.checks.trainer import check_parallel_trainer, check_trainer
from experiments.checks.values import check_positive, check_true_or_false, check_whole_numbers
from experiments.planning.fit import check_card
from experiments.planning.memory import SAMPLES_HERE
from experiments.running.build import build, is_off
from experiments.running.hardware import (
    check_gpus,
    check_processes,
    check_this_machine,
    gpu_memory,
    wait_for_server,
)
from experiments.running.held_out import check_held_out
from otb import baselines
from otb.errors import RunError
from otb.training.options import NEUTRAL_SAMPLING, batches, refuse_band, refuse_broken_groups, refuse_options

SMALLEST = {  # of the keys that are whole numbers
    "group_size": 1,
    "prompts_per_step": 1,
    "steps": 1,
    "evaluation.samples": 1,
    "seed": 0,
    "evaluation.every": 0,
    "checkpoint_every": 0,
    "rollouts.every": 0,
    "rollouts.groups": 0,
}


def check(cfg: DictConfig, processes: int | None = None) -> None:
    """Raises RunError for a configuration that cannot run as written. Reads no dataset and loads no model.

    processes: how many train the run together, elsewhere; None: this process is one of them, and the environment says
    of how many.
    """
    check_whole_numbers(cfg, SMALLEST)
    check_learning_rate(cfg)
    for key in ("log_energy", "measure_gradient_noise", "lean_steps", "deterministic", "overwrite"):
        check_true_or_false(cfg, key)
    check_policy_and_task(cfg)
    check_training_rows(cfg)
    check_held_out(cfg)
    check_trainer(cfg)
    check_parallel_and_sampler(cfg)
    _check_baseline(cfg)
    check_methods(cfg)
    _check_band(cfg)
    check_gpus(cfg)
    gpu_bytes, runs_here = None, processes is None
    if processes is None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        check_this_machine(cfg)
        gpu_bytes = None if cfg.trainer.get("use_cpu") else gpu_memory()
    _check_batches(cfg, processes)
    check_processes(cfg, processes)
    check_card(cfg, processes, gpu_bytes)
    if runs_here:
        wait_for_server(cfg)


def check_learning_rate(cfg: DictConfig) -> None:
    """Raises RunError for a learning rate that is not positive, or that the study has not searched for."""
    try:
        check_positive(cfg, "learning_rate", "1e-6")
    except InterpolationResolutionError as error:  # ${tuned_rate:...}; OmegaConf keeps its RunError as a context alone
        found: BaseException | None = error
        while found is not None and not isinstance(found, RunError):
            found = found.__context__
        raise found or error from None


def check_parallel_and_sampler(cfg: DictConfig) -> None:
    """Raises RunError for keys of `parallel` and `rollouts_by` that the chosen ones do not read."""
    check_keys_of_choice(cfg, "parallel")
    check_keys_of_choice(cfg, "rollouts_by")
    check_parallel_trainer(cfg)


def check_policy_and_task(cfg: DictConfig) -> None:
    """Checks what a run and a measurement have in common: temperature, task, sandbox, model. Raises RunError."""
    check_positive(cfg, "temperature", "1.0")
    if cfg.max_prompt_length is not None and (type(cfg.max_prompt_length) is not int or cfg.max_prompt_length < 1):
        raise RunError(
            f"max_prompt_length={cfg.max_prompt_length} must be a whole number >= 1, or null for the model's limit. "
            "Try max_prompt_length=null."
        )
    check_model_and_task(cfg)
    if build(cfg, "task").environment is not None:
        _check_sandbox(cfg)


def check_model_and_task(cfg: DictConfig) -> None:
    """Checks the keys of these two groups. Raises RunError."""
    check_target("task", cfg.task)
    build(cfg, "task")  # its constructor may refuse a value
    check_model(cfg)


def _check_sandbox(cfg: DictConfig) -> None:
    for key in cfg.sandbox:
        if OmegaConf.is_missing(cfg.sandbox, key):
            raise RunError(f"sandbox.{key} is not set, and this sandbox needs it. Try sandbox.{key}=VALUE.")
    check_target("sandbox", cfg.sandbox)
    build(cfg, "sandbox")


def _check_baseline(cfg: DictConfig) -> None:
    baseline = check_target("baseline", cfg.baseline)
    options = NEUTRAL_SAMPLING | {
        "num_generations": cfg.group_size,
        "multi_objective_aggregation": "sum_then_normalize",
        "off_policy_mask_threshold": None,
        "loss_type": "dr_grpo",
        "generation_kwargs": None,
        "use_vllm": cfg.rollouts_by.name not in SAMPLES_HERE,
    }
    if inspect.isclass(baseline) == bool(cfg.baseline.get("_partial_")):
        what, fix = ("class", "false") if inspect.isclass(baseline) else ("function", "true")
        raise RunError(
            f"baseline._target_={cfg.baseline._target_} is a {what}; functions wait for their rollouts and classes are "
            f"built at once. Use baseline._partial_={fix}."
        )
    if inspect.isclass(baseline):
        build(cfg, "baseline")  # its constructor may refuse a value
    try:
        needs_scores = cfg.log_energy or cfg.measure_gradient_noise or baselines.needs_scores(baseline)
        refuse_options(
            SimpleNamespace(**(options | dict(cfg.trainer))), baseline, needs_scores, not is_off(cfg, "token_weights")
        )
    except ValueError as error:
        raise RunError(str(error).replace("num_generations=", "group_size=")) from error


def _check_band(cfg: DictConfig) -> None:
    band, sampler = cfg.geometric_ratio_band, cfg.rollouts_by.name
    options = {
        "geometric_ratio_band": OmegaConf.to_container(band) if isinstance(band, ListConfig) else band,
        "use_vllm": sampler not in SAMPLES_HERE,
        "sampler_dtype": "bfloat16" if sampler == "hf_bfloat16" else None,
    }
    try:
        refuse_band(SimpleNamespace(**(dict(cfg.trainer) | options)))
    except ValueError as error:
        keys = {
            "use_vllm=True (or sampler_dtype=bfloat16)": "rollouts_by=vllm (or hf_bfloat16)",
            "use_vllm=False": "rollouts_by=hf",
            "vllm_importance": "trainer.vllm_importance",
            "[0.99,1.01]": "'[0.99,1.01]'",
            "None": "null",
        }
        text = str(error)
        for option, key in keys.items():
            text = text.replace(option, key)
        raise RunError(text) from error


def _check_batches(cfg: DictConfig, processes: int) -> None:
    try:
        step = batches(cfg.prompts_per_step, cfg.group_size, processes, cfg.model.rollouts_per_forward)
        if cfg.measure_gradient_noise:
            refuse_broken_groups(step, cfg.group_size, processes)
    except ValueError as error:
        raise RunError(str(error)) from error
    cycle = cfg.trainer.get("num_iterations", 1)
    if type(cycle) is not int or cycle < 1:
        raise RunError(f"trainer.num_iterations={cycle} must be a whole number of at least 1.")
    if cfg.steps % cycle:
        raise RunError(
            f"steps={cfg.steps} must be a multiple of trainer.num_iterations={cycle}: the last checkpoint falls on a "
            f"generation. Try steps={max(1, cfg.steps // cycle) * cycle}."
        )
