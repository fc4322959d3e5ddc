"""Checks that the rows and the model of a run are where its configuration says. Reads neither, imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from huggingface_hub import constants
from omegaconf import DictConfig

from experiments.checks.model import check_model_is_here
from experiments.running.build import build
from experiments.running.held_out import held_out_tasks
from otb.errors import RunError
from otb.tasks.loading import refuse_absent
from otb.tasks.sources import Source


def check_training_rows(cfg: DictConfig) -> None:
    """Raises RunError for a task that has none."""
    task = build(cfg, "task")
    if hasattr(task, "training_source"):
        try:
            task.training_source()
        except ValueError as error:
            raise RunError(str(error)) from error


def check_files(cfg: DictConfig, here: bool = True) -> None:
    """Raises RunError for paths of rows that do not exist, and with HF_HUB_OFFLINE for hub ids that are not cached.

    here: whether the run is for this machine; the caches of another may hold more.
    """
    check_sources(getattr(build(cfg, "task"), "sources", list)(), here)
    if not here or not constants.HF_HUB_OFFLINE:
        return
    for name, task in held_out_tasks(cfg).items():
        check_sources(getattr(task, "evaluation_sources", list)(), of=f"evaluation.tasks, {name}: ")
    check_model_is_here(cfg)


def check_sources(sources: Iterable[Source], here: bool = True, of: str = "") -> None:
    """Raises RunError where one of the sources is not there. of: what the message begins with."""
    for source in sources:
        try:
            refuse_absent(source, offline=here)
        except ValueError as error:
            raise RunError(f"{of}{error}") from error
