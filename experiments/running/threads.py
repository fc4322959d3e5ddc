"""Decides on how many threads of the processor a command computes. Imports no torch, and must be imported before it.

One thread until the model is known, then `threads=`: the tiny policy gains little by a second one and loses by it where
anything else runs, and its results must not depend on the number of cores; for a real model the cores are shared out
among the runs that stand side by side. Whoever sets OMP_NUM_THREADS has decided already (docs/choices.md).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from otb.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CORES = "OTB_CORES"  # variable: how many cores this run may use; a sweep on one machine gives each run its share
SMALL = 256  # hidden size up to which a policy is small; the tiny policy has 96
# A thread that waits for the others spins so often, some 50 us, before it sleeps. By default it is 100 times as long,
# which makes two threads slower than one as soon as another program wants a core.
SPINS = "3000"


def physical_cores() -> int:
    """Counts the cores that this process may use: those of its affinity, in a job of SLURM no more than it asked for.

    Processors of one core count once, as they share the units that multiply matrices.
    """
    cpus = os.sched_getaffinity(0)
    topology = Path("/sys/devices/system/cpu")
    try:
        cores = len({(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text() for cpu in cpus})
    except OSError:  # some containers do not show it
        cores = len(cpus)
    return min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", cores)))  # not every cluster binds a job to its cores


if "OMP_NUM_THREADS" not in os.environ:  # torch reads both once
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault(CORES, str(physical_cores()))


def check_threads(cfg: DictConfig) -> None:
    """Raises RunError unless `threads` is auto or a number of threads."""
    if cfg.threads != "auto" and (type(cfg.threads) is not int or cfg.threads < 1):
        raise RunError(f"threads={cfg.threads} must be auto or a whole number >= 1. Try threads=auto.")


def threads(asked: int | str, hidden_size: int) -> int | None:
    """Returns the threads of a process; None leaves them as OMP_NUM_THREADS has set them.

    asked: the key `threads`. hidden_size: of the model.
    """
    if asked != "auto":
        return int(asked)
    if CORES not in os.environ:
        return None
    if hidden_size <= SMALL:
        return 1
    return max(1, int(os.environ[CORES]) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def use_threads(asked: int | str, model: PreTrainedConfig) -> None:
    """Lets torch compute on so many threads from now on."""
    count = threads(asked, model.get_text_config().hidden_size)
    if count is not None:
        import torch

        torch.set_num_threads(count)


def share_of(runs: int) -> dict[str, str]:
    """Returns what a run finds in its environment where so many `runs` share the cores."""
    return {CORES: str(max(1, int(os.environ[CORES]) // runs))} if CORES in os.environ else {}
