"""Hydra finds launchers only below hydra_plugins: those of this project, their options, and the sweeper they go with.

Imported at every start of experiments/run.py, so everything else is imported when a sweep is launched. Hydra executes
this file before it is in sys.modules, which a dataclass with postponed annotations would need.
"""

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Optional

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as PluginLauncher
from omegaconf import DictConfig


@dataclass
class LocalConf:
    _target_: str = "hydra_plugins.otb_launchers.LocalLauncher"
    parallel: Optional[int] = None  # noqa: UP045 - OmegaConf reads the annotation
    max_restarts: int = 3
    wait: bool = True


@dataclass
class SlurmConf(SlurmQueueConf):
    """The plugin's options, and those that it lacks."""

    _target_: str = "hydra_plugins.otb_launchers.SlurmLauncher"
    wait: bool = True
    max_restarts: int = 3
    container: list[str] = field(default_factory=list)
    srun_args: list[str] = field(default_factory=list)


for name, node in (("otb_local", LocalConf), ("otb_slurm", SlurmConf)):
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="otb")


class Sweeper(BasicSweeper):
    """Hydra's own; but it composes every run to see whether it can, and the launchers do that too."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        pass


class LocalLauncher(Launcher):
    def __init__(self, parallel: int | None, max_restarts: int, wait: bool):
        self.parallel, self.max_restarts, self.wait = parallel, max_restarts, wait

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from experiments.sweeps.local import launch

        with refusals_shown():
            options = self.parallel, self.max_restarts, self.wait
            launch(self.hydra_context.config_loader, self.config, job_overrides, *options)
        return [JobReturn(status=JobStatus.COMPLETED)] * len(job_overrides)


class SlurmLauncher(PluginLauncher):
    """The plugin's options and sbatch files; but jobs that survive their submitter, preemption and time limits."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from slurm.submit import launch

        with refusals_shown():
            launch(self.hydra_context.config_loader, self.config, job_overrides, dict(self.params))
        return [JobReturn(status=JobStatus.COMPLETED)] * len(job_overrides)


@contextmanager
def refusals_shown():
    """Hydra would show a traceback of its own inside."""
    from otb.errors import RunError

    try:
        yield
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
