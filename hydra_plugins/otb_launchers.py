"""Defines this project's launchers, their options and their sweeper, in hydra_plugins, where Hydra looks for plugins.

Every start of experiments/run.py imports this file, so it imports heavy modules only when a sweep is launched. Hydra
executes it before it is in sys.modules, so its dataclasses cannot have postponed annotations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # private: Hydra has no public one
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher as PluginLauncher
from omegaconf import DictConfig


@dataclass
class LocalConf:
    """Options of hydra/launcher=local."""

    _target_: str = "hydra_plugins.otb_launchers.LocalLauncher"
    parallel: Optional[int] = None  # noqa: UP045 - OmegaConf reads the annotation
    max_restarts: int = 3
    wait: bool = True


@dataclass
class SlurmConf(SlurmQueueConf):
    """Options of hydra/launcher=slurm: all options of hydra-submitit-launcher, and four more."""

    _target_: str = "hydra_plugins.otb_launchers.SlurmLauncher"
    wait: bool = True
    max_restarts: int = 3
    container: list[str] = field(default_factory=list)
    srun_args: list[str] = field(default_factory=list)


for name, node in (("otb_local", LocalConf), ("otb_slurm", SlurmConf)):
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="otb")


class Sweeper(BasicSweeper):
    """Hydra's own sweeper without its check that every run composes, because the launchers check this too."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Does nothing; experiments/sweeps/runs_of.py composes and checks every run."""


class LocalLauncher(Launcher):
    """Runs a sweep on this machine, each run in its own process."""

    def __init__(self, parallel: int | None, max_restarts: int, wait: bool):
        self.parallel, self.max_restarts, self.wait = parallel, max_restarts, wait

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from experiments.running.command_line import refusals
        from experiments.sweeps.local import launch

        with refusals():
            options = self.parallel, self.max_restarts, self.wait
            launch(self.hydra_context.config_loader, self.config, job_overrides, *options)
        return [JobReturn(status=JobStatus.COMPLETED)] * len(job_overrides)


class SlurmLauncher(PluginLauncher):
    """Submits runs with the plugin's options, but its jobs survive their submitter, preemption and time limits."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from experiments.running.command_line import refusals
        from slurm.submit import launch

        with refusals():
            launch(self.hydra_context.config_loader, self.config, job_overrides, dict(self.params))
        return [JobReturn(status=JobStatus.COMPLETED)] * len(job_overrides)
