"""Turns the command line of experiments/evaluate.py into a plan. Imports no torch.

Every refusal is a RunError with the value, the rule and the fix, before the first heavy import.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from hydra import compose
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments import checks
from experiments.checks.files import check_sources
from experiments.checks.machine import check_this_machine
from experiments.checks.model import check_model_is_here
from experiments.checks.samplers import check_processes
from experiments.checks.trainer import SHARE, check_parallel_and_sampler
from experiments.checks.values import check_numbers, check_true_or_false, whole_number
from experiments.evaluation.policies_of import Plan
from experiments.running.build import build
from experiments.running.command_line import CONF, near_miss
from experiments.running.processes import wait_for_server
from otb.errors import RunError
from otb.records import RunDirectory
from otb.sandbox import Sandbox
from otb.tasks import Task

SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs")
LIMITS = ("max_completion_length", "max_turns")
NUMBERS = {
    **dict.fromkeys(("k", "rollouts_per_batch"), whole_number(1)),
    "seed": whole_number(0),
    "gpus": whole_number(1, "null", "null for one process"),
    "trainer.top_p": SHARE,
}
OF_A_RUN = ("task", "model", "temperature", "trainer", "steps")  # keys in the config.yaml of every run


def plan(cfg: DictConfig, overrides: list[str], task: str, processes: int = 1) -> Plan:
    """Returns the plan of an evaluation; raises RunError for a command that cannot be carried out.

    overrides: from the command line. task: the choice of conf/task in `cfg`. processes: the number that share the work.
    """
    given = {override.lstrip("+").split("=", 1)[0] for override in overrides}
    check_numbers(cfg, NUMBERS)
    check_true_or_false(cfg, "watch", "trainer.use_cpu")
    check_policies(cfg, given)
    run = None if cfg.run is None else RunDirectory(Path(str(cfg.run)).expanduser())
    recorded = None if run is None else recorded_configuration(run)
    names = task_names(cfg, given)
    if names is not None:
        kept = [override for override in overrides if override.lstrip("+").split("=", 1)[0] != "tasks"]
        configurations = {name: compose("evaluate", overrides=[*kept, f"task={name}"]) for name in names}
    elif recorded is None or "task" in given:
        configurations = {task: cfg}
    else:
        cfg = with_values(cfg, {"task": recorded.task}, given)
        configurations = {str(build(cfg, "task").name): cfg}
    if recorded is not None:
        configurations = {
            name: with_values(one, of_run(recorded) | limits_of_run(recorded, one), given)
            for name, one in configurations.items()
        }
    built = {name: checked_task(one) for name, one in configurations.items()}
    tasks = {name: task for name, (task, _) in built.items()}
    sandbox = next((sandbox for _, sandbox in built.values() if sandbox is not None), None)
    check_sampling(configurations, tasks, processes)
    wanted = Plan(cfg, configurations, tasks, sandbox, run, recorded)
    if run is not None and not cfg.watch and not wanted.checkpoints():
        raise RunError(f"run={cfg.run} has no complete checkpoint yet. Use watch=true to wait for its checkpoints.")
    return wanted


def recorded_configuration(run: RunDirectory) -> DictConfig:
    """Returns the configuration that a run wrote; raises RunError if the folder is not a run directory."""
    recorded = OmegaConf.load(run.config_file) if run.config_file.is_file() else {}
    if not all(key in recorded for key in OF_A_RUN):
        what = "is not a folder" if not run.path.is_dir() else "has no run's config.yaml"
        raise RunError(f"run={run.path} {what}. Give a run directory, such as runs/arithmetic-tiny/otb-n4-seed0.")
    return recorded


def of_run(recorded: DictConfig) -> dict:
    """Returns the values that a run sets unless the command line does: model, temperature and sampling options."""
    sampling = {f"trainer.{key}": recorded.trainer[key] for key in SAMPLING if key in recorded.trainer}
    return {"model": recorded.model, "temperature": recorded.temperature} | sampling


def limits_of_run(recorded: DictConfig, cfg: DictConfig) -> dict:
    """Returns the run's limits of a response, for the task of `cfg`. Limits that this task does not take are left out.

    A policy that was trained with Python therefore has it in its evaluation too.
    """
    taken = inspect.signature(get_object(cfg.task._target_)).parameters
    limits = {key: recorded.task.get(key) for key in LIMITS}
    return {f"task.{key}": limit for key, limit in limits.items() if limit is not None and key in taken}


def with_values(cfg: DictConfig, values: dict, given: set[str]) -> DictConfig:
    """Returns a copy of the configuration with these values, except for keys that the command line sets (`given`)."""
    changed, typed = cfg.copy(), OmegaConf.to_container(cfg, resolve=False)
    with open_dict(changed):
        for key, value in values.items():
            if key not in given:
                OmegaConf.update(changed, key, value, merge=False)
        for key in given:
            top, *rest = key.split(".")
            if top in values and rest:
                value = typed[top]
                for part in rest:
                    value = value[part]
                OmegaConf.update(changed, key, value)
    return changed


def task_names(cfg: DictConfig, given: set[str]) -> list[str] | None:
    """Returns the names in `tasks`, each once; None if it is not set. Raises RunError for an unknown task."""
    if cfg.tasks is None:
        return None
    if "task" in given:
        raise RunError(f"tasks={list(cfg.tasks)} and task= are both set; only one may name the tasks. Leave one out.")
    names = OmegaConf.to_container(cfg)["tasks"]
    names = names if isinstance(names, list) else [names]
    known = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    for name in names:
        if name not in known:
            raise RunError(f"tasks: {name} is not a task.{near_miss(name, known)} Known: {', '.join(known)}.")
    if not names:
        raise RunError("tasks=[] must name a task. Try tasks=[math500].")
    return list(dict.fromkeys(names))


# ---- refusals


def check_policies(cfg: DictConfig, given: set[str]) -> None:
    """Raises RunError if it is not clear which weights are meant, or if they do not exist."""
    if cfg.watch and cfg.run is None:
        raise RunError(
            "watch=true waits for the checkpoints of a run, but run is not set. Add run=RUN, a run directory."
        )
    if cfg.checkpoint is not None and not Path(str(cfg.checkpoint)).expanduser().is_dir():
        raise RunError(f"checkpoint={cfg.checkpoint} is not a folder. Give RUN/checkpoints/step-XXXXXXXX.")
    if cfg.run is None:
        return
    if cfg.checkpoint is not None:
        raise RunError(
            f"run={cfg.run} and checkpoint={cfg.checkpoint} are both set; a run means all its checkpoints. "
            "Leave one out."
        )
    if models := sorted(key for key in given if key == "model" or key.startswith("model.")):
        raise RunError(f"{models[0]} is set, but run={cfg.run} has its own model. Leave one of them out.")


def checked_task(cfg: DictConfig) -> tuple[Task, Sandbox | None]:
    """Returns the task, and the sandbox of one with tools.

    Raises RunError for an invalid task, model or sandbox, or a task without evaluation rows.
    """
    task, sandbox = checks.check_policy_and_task(cfg)
    if getattr(task, "evaluation", None) is None and getattr(task, "eval_split", task) is None:
        raise RunError(
            f"task {task.name} has neither eval_split nor evaluation, so there is nothing to evaluate on. Try "
            "task.eval_split=test, or tasks=[math500]."
        )
    return task, sandbox


def check_files(wanted: Plan) -> None:
    """Raises RunError if rows or model do not exist; reads neither."""
    for name, cfg in wanted.configurations.items():
        check_sources(getattr(wanted.tasks[name], "evaluation_sources", list)())
        check_model_is_here(cfg)


def check_sampling(configurations: dict[str, DictConfig], tasks: dict[str, Task], processes: int) -> None:
    """Raises RunError for invalid sampling options, and for processes that cannot share the work."""
    cfg = next(iter(configurations.values()))
    check_parallel_and_sampler(cfg)
    if cfg.parallel.name != "ddp":
        raise RunError(
            f"parallel={cfg.parallel.name} divides training, but nothing is trained here. Leave it out; with "
            "rollouts_by.tensor_parallel=2, two GPUs share a policy that is too large for one."
        )
    if cfg.rollouts_by.get("rows") is not None:
        rows = cfg.rollouts_by.rows
        raise RunError(f"rollouts_by.rows={rows} divides batches of training steps. Use rollouts_per_batch={rows}.")
    check_this_machine(cfg)
    for one in configurations.values():
        check_processes(one, processes)
    if cfg.rollouts_by.name != "hf" and len({task.environment is None for task in tasks.values()}) > 1:
        raise RunError(
            f"tasks={list(configurations)} mixes tasks with and without Python, and each kind needs its own vLLM. Use "
            "one command for each kind."
        )
    wait_for_server(cfg)
