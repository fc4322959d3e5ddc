"""Checks of a composed configuration, before anything heavy is imported: a refusal answers in a third of a second.

Importing torch takes 3 s and TRL 8 s, and neither a wrong key on a login node nor one in 200 runs of a sweep should
cost that. This is why everything that reads a configuration does without them: types of tensors are imported
under TYPE_CHECKING, baselines import torch inside their functions, the options of GRPOConfig are read from its source
file (fields.py), and run.py imports train.py last. tests/promises/test_architecture.py lists the modules that must stay
light.

Called by experiments/run.py, experiments/variance.py, and for every run of a sweep by experiments/sweeps/runs_of.py.
"""

from __future__ import annotations

import os

from omegaconf import DictConfig, OmegaConf

from experiments.checks.files import check_training_rows
from experiments.checks.machine import check_this_machine
from experiments.checks.methods import check_methods_act, checked_baseline, checked_methods
from experiments.checks.model import check_model
from experiments.checks.samplers import check_processes
from experiments.checks.target import check_target
from experiments.checks.trainer import check_parallel_and_sampler, check_trainer
from experiments.checks.values import check_numbers, check_positive, check_true_or_false, told_to_the_user, whole_number
from experiments.planning.fit import check_card
from experiments.running import devices
from experiments.running.build import Run, build
from experiments.running.grpo_options import asked_by
from experiments.running.held_out import checked_held_out
from experiments.running.processes import wait_for_server
from otb.errors import RunError
from otb.sandbox import Sandbox
from otb.tasks import Task
from otb.training.options import Batches, batches, refuse

NUMBERS = {
    "group_size": whole_number(1, 4),  # most baselines compare rollouts
    **dict.fromkeys(("prompts_per_step", "steps", "evaluation.samples"), whole_number(1)),
    **dict.fromkeys(("seed", "evaluation.every", "checkpoint_every"), whole_number(0)),
    **dict.fromkeys(("rollouts.every", "rollouts.groups"), whole_number(0)),
    "gpus": whole_number(1, "null", "null for one process"),
    "evaluation.max_rows": whole_number(1, 64, "null for all"),
}
SWITCHES = ("log_energy", "measure_gradient_noise", "lean_steps", "deterministic", "overwrite")
LONGEST_PROMPT = {"max_prompt_length": whole_number(1, "null", "null for the model's limit")}


def check(cfg: DictConfig, processes: int | None = None) -> Run:
    """Returns the run that a configuration describes. Reads no dataset and loads no model.

    processes: how many train the run together, elsewhere; None: this process is one of them, and the environment says
    of how many. Raises RunError for a configuration that cannot run as written.
    """
    check_numbers(cfg, NUMBERS)
    check_positive(cfg, "learning_rate", "1e-6")
    check_true_or_false(cfg, *SWITCHES)
    task, sandbox = check_policy_and_task(cfg)
    check_training_rows(task)
    held_out = checked_held_out(cfg, task)
    check_trainer(cfg)
    check_parallel_and_sampler(cfg)
    trained_by = int(os.environ.get("WORLD_SIZE", 1)) if processes is None else processes
    baseline, methods = checked_baseline(cfg), checked_methods(cfg)
    run = Run(cfg, task, sandbox, held_out, baseline, methods, trained_by, _batches(cfg, trained_by))
    with told_to_the_user():
        refuse(asked_by(run))
    check_methods_act(run)
    gpu_bytes = None
    if processes is None:
        check_this_machine(cfg)
        gpu_bytes = None if cfg.trainer.get("use_cpu") else devices.gpu_memory()
    check_processes(cfg, trained_by)
    check_card(cfg, trained_by, gpu_bytes)
    if processes is None:
        wait_for_server(cfg)
    return run


def check_policy_and_task(cfg: DictConfig) -> tuple[Task, Sandbox | None]:
    """Checks what a run and a measurement have in common; returns the task and, for one with tools, the sandbox.

    Raises RunError.
    """
    check_positive(cfg, "temperature", "1.0")
    check_numbers(cfg, LONGEST_PROMPT)
    task = check_model_and_task(cfg)
    return task, None if task.environment is None else _checked_sandbox(cfg)


def check_model_and_task(cfg: DictConfig) -> Task:
    """Checks the keys of these two groups, and returns the task. Raises RunError."""
    check_target("task", cfg.task)
    task = build(cfg, "task")
    check_model(cfg)
    return task


def _checked_sandbox(cfg: DictConfig) -> Sandbox:
    for key in cfg.sandbox:
        if OmegaConf.is_missing(cfg.sandbox, key):
            raise RunError(f"sandbox.{key} is not set, and this sandbox needs it. Try sandbox.{key}=VALUE.")
    check_target("sandbox", cfg.sandbox)
    return build(cfg, "sandbox")


def _batches(cfg: DictConfig, processes: int) -> Batches:
    check_numbers(cfg, {"trainer.num_iterations": whole_number(1)} if "num_iterations" in cfg.trainer else {})
    cycle = cfg.trainer.get("num_iterations", 1)
    if cfg.steps % cycle:
        raise RunError(
            f"steps={cfg.steps} must be a multiple of trainer.num_iterations={cycle}: the last checkpoint falls on a "
            f"generation. Try steps={max(1, cfg.steps // cycle) * cycle}."
        )
    with told_to_the_user():
        return batches(cfg.prompts_per_step, cfg.group_size, processes, cfg.model.rollouts_per_forward)
