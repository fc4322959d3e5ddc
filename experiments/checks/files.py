"""Checks that the rows and the model of a run are where its configuration says. Reads neither, imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from huggingface_hub import constants
from omegaconf import DictConfig

from experiments.checks.model import check_model_is_here
from experiments.checks.values import told_to_the_user
from otb.tasks import Task
from otb.tasks.loading import refuse_absent
from otb.tasks.sources import Source


def check_training_rows(task: Task) -> None:
    """Raises RunError for a task that has none."""
    if hasattr(task, "training_source"):
        with told_to_the_user():
            task.training_source()


def check_files(cfg: DictConfig, task: Task, held_out: Mapping[str, Task], here: bool = True) -> None:
    """Raises RunError for paths of rows that do not exist, and with HF_HUB_OFFLINE for hub ids that are not cached.

    held_out: further tasks whose rows are evaluated on, by name. here: whether the run is for this machine; the caches
    of another may hold more.
    """
    check_sources(getattr(task, "sources", list)(), here)
    if not here or not constants.HF_HUB_OFFLINE:
        return
    for name, one in held_out.items():
        check_sources(getattr(one, "evaluation_sources", list)(), of=f"evaluation.tasks, {name}: ")
    check_model_is_here(cfg)


def check_sources(sources: Iterable[Source], here: bool = True, of: str = "") -> None:
    """Raises RunError where one of the sources is not there. of: what the message begins with."""
    with told_to_the_user(of):
        for source in sources:
            refuse_absent(source, offline=here)
