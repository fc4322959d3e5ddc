"""Builds and checks the further evaluation sets of a run, `evaluation.tasks`. Importing this file imports no torch.

A set provides problems and a grader. The run's own task decides the length limit of a response and the Python tool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.running.build import build
from experiments.running.command_line import CONF, near_miss
from otb.errors import RunError
from otb.tasks import Task


class HeldOut(NamedTuple):
    """Holds an evaluation set.

    name: the name of its task. rows: its problems. reward: grades responses, as a task's `reward` does.
    """

    name: str
    rows: list[dict[str, Any]]
    reward: Callable


def own_name(task: Task) -> str:
    """Returns the name of the set from which the run's own evaluation rows come."""
    return getattr(getattr(task, "evaluation", None), "name", task.name)


def _held_out_tasks(cfg: DictConfig, own: Task) -> dict[str, Task]:
    known = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    names = cfg.evaluation.tasks
    if names is not None and not isinstance(names, ListConfig):
        raise RunError(f"evaluation.tasks={names} must be a list of tasks. Try 'evaluation.tasks=[{names}]'.")
    tasks: dict[str, Task] = {}
    for name in names or ():
        if name not in known:
            raise RunError(f"evaluation.tasks: {name} is no task.{near_miss(name, known)} Known: {', '.join(known)}.")
        if name in (own_name(own), *tasks):
            raise RunError(f"evaluation.tasks names {name}, which is evaluated already. Leave it out there.")
        tasks[name] = build(_in_folder(_composed(name), cfg.evaluation.data_dir), "task")
        _check(name, tasks[name], own)
    return tasks


def checked_held_out(cfg: DictConfig, own: Task) -> dict[str, Task]:
    """Returns the tasks of `evaluation.tasks` by name. own: the run's task. Reads no rows.

    Raises RunError for keys of `evaluation` that cannot be, and for tasks that this run cannot be evaluated on.
    """
    node = cfg.evaluation
    if node.data_dir is not None and not Path(str(node.data_dir)).expanduser().is_dir():
        raise RunError(f"evaluation.data_dir={node.data_dir} is not a folder. Give one with a folder per set.")
    for key in ("data_dir", "max_rows"):
        if node[key] is not None and not node.tasks:
            raise RunError(
                f"evaluation.{key}={node[key]} applies to the sets in evaluation.tasks, and there are none. Leave it "
                "out; task.path and task.max_eval_rows apply to the run's own rows."
            )
    return _held_out_tasks(cfg, own)


def held_out_rows(cfg: DictConfig, tasks: Mapping[str, Task]) -> list[HeldOut]:
    """Returns the sets with their first `evaluation.max_rows` rows. Raises RunError for rows that cannot be read."""
    sets = []
    for name, task in tasks.items():
        try:
            rows = list(task.eval_dataset())
        except (ValueError, FileNotFoundError) as error:
            raise RunError(f"evaluation.tasks, {name}: {error}") from error
        sets.append(HeldOut(name, rows[: cfg.evaluation.max_rows], task.reward))
    return sets


def _composed(name: str) -> DictConfig:
    """Returns {"task": configuration} for a task of conf/task."""
    begun = GlobalHydra.instance().is_initialized()  # True in a command, False if code calls this module directly
    with nullcontext() if begun else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(overrides=[f"+task={name}"])


def _in_folder(cfg: DictConfig, folder: str | None) -> DictConfig:
    """Returns a task's configuration that reads its rows from FOLDER/NAME; the rows of its `evaluation` likewise."""
    for key in ("task", "task.evaluation"):
        if folder is not None and OmegaConf.select(cfg, f"{key}.path") is not None:
            name = OmegaConf.select(cfg, f"{key}.name")
            OmegaConf.update(cfg, f"{key}.path", str(Path(str(folder)).expanduser() / name))
    return cfg


def _check(name: str, task: Task, own: Task) -> None:
    try:
        _ = [source.local for source in getattr(task, "evaluation_sources", list)()]  # raises if a path does not exist
    except ValueError as error:
        raise RunError(f"evaluation.tasks, {name}: {error}") from error
    if getattr(task, "evaluation", None) is None and getattr(task, "eval_split", task) is None:
        raise RunError(f"evaluation.tasks: {name} has no evaluation rows. Try 'evaluation.tasks=[math500]'.")
    if task.environment is not None and own.environment is None:
        raise RunError(
            f"evaluation.tasks: {name} is solved with Python, but the run's task {own.name} has none. Leave {name} "
            "out, or train on a task with tools."
        )
