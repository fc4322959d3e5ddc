"""Experiment trackers, `trainer.report_to`: which there are, and how a resumed run stays one run at each of them.

checks/ refuses unknown names, train.py names the run and ends it, run_trainer.py keeps W&B's count. For users:
docs/runs.md, Trackers. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from omegaconf import DictConfig

from experiments.running.command_line import near_miss
from otb.errors import RunError
from otb.records import RunDirectory

TRACKERS = ("tensorboard", "wandb", "trackio")
CALLS_PER_STEP = 10_000  # more than a tracker is sent in one step


def chosen(cfg: DictConfig) -> list[str]:
    """Returns the names in `trainer.report_to`, which may be one name, a list, or none."""
    names = cfg.trainer.get("report_to") or "none"
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def refuse_unknown(cfg: DictConfig) -> None:
    """Raises RunError for a tracker that is none of TRACKERS, or whose package is not installed."""
    for name in chosen(cfg):
        if name not in TRACKERS:
            raise RunError(
                f"trainer.report_to={name} is not one of {', '.join(TRACKERS)}, none.{near_miss(name, TRACKERS)}"
            )
        if importlib.util.find_spec(name) is None:
            raise RunError(f"trainer.report_to={name} needs the package {name}. Run: pip install {name}")


def run_name(names: list[str], directory: RunDirectory) -> str:
    """Returns the run's name at its trackers. trackio knows a run by its name alone, so that it carries the id."""
    name = f"{directory.path.parent.name}/{directory.path.name}"
    return f"{name}-{directory.run_id()}" if "trackio" in names else name


def prepare(names: list[str], directory: RunDirectory) -> None:
    """Sets the environment that makes a resumed run the same run at its trackers. Called before they start."""
    if "tensorboard" in names:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(directory.path / "tensorboard")
    if "wandb" in names:
        os.environ["WANDB_DIR"] = str(directory.path.absolute())
        os.environ["WANDB_RUN_ID"] = directory.run_id()
        os.environ["WANDB_RESUME"] = "allow"


def advance(names: list[str], step: int, before_next: bool = False) -> None:
    """Lifts W&B's count of calls to CALLS_PER_STEP times the optimizer steps done; by half a step more `before_next`.

    W&B counts what it is sent, TRL's timings too, from 0 in every process, so that a resumed run would overwrite its
    own beginning. The axis of its plots is train/global_step.
    """
    wandb = sys.modules.get("wandb") if "wandb" in names else None
    count = CALLS_PER_STEP * step + (CALLS_PER_STEP // 2 if before_next else 0)
    if wandb is not None and wandb.run is not None and wandb.run.step < count:
        wandb.run.log({}, step=count)


def finish() -> None:
    """Ends the W&B run: the next run of a sweep may live in this very process, and transformers would log into it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()
