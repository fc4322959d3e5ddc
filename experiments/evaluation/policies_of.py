"""Says which policies experiments/evaluate.py evaluates, on which tasks and in which folders. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from experiments.evaluation.folder import EvaluationFolder, samples_together
from experiments.running.identity import kept_keys, of_sandbox, weights_digest
from otb.records import RunDirectory
from otb.sandbox import Sandbox
from otb.tasks import Task

OF_A_SAMPLE = ("name", "tensor_parallel")  # keys of `rollouts_by` that affect samples
OF_TRAINING = ("learning_rate", "rollouts_per_forward", "lora")  # keys of `model` that do not affect samples
RUN_IS_OVER = ("finished", "failed")


@dataclass(frozen=True)
class Checkpoint:
    """Weights to evaluate, in the folder `path`, or the model itself if None. step: the step of a run's checkpoint."""

    path: Path | None = None
    step: int | None = None


@dataclass(frozen=True)
class Plan:
    """The policies and tasks that a command evaluates.

    cfg: the command's configuration. configurations: task name -> the configuration with this task, and with model and
    sampling options of the run if there is one. tasks: built from them. sandbox: for the tasks with tools, if there are
    any. run: the run whose checkpoints are evaluated. recorded: its own configuration.
    """

    cfg: DictConfig
    configurations: dict[str, DictConfig]
    tasks: dict[str, Task]
    sandbox: Sandbox | None = None
    run: RunDirectory | None = None
    recorded: DictConfig | None = None

    # ---- policies

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the policies that exist now, including checkpoints that an interrupted evaluation holds."""
        if self.run is None:
            return [Checkpoint(None if self.cfg.checkpoint is None else Path(self.cfg.checkpoint).expanduser())]
        held = [int(path.name.removeprefix("step-")) for path in self.held(0).parent.glob("step-*")]
        return [Checkpoint(self.run.checkpoint(step), step) for step in sorted({*self.run.checkpoint_steps(), *held})]

    def run_is_over(self) -> bool:
        """Returns whether the run will write no further checkpoint."""
        if self.run is None:
            return True
        status = self.run.status()
        return status.get("state") in RUN_IS_OVER or "error" in status  # interrupted by Ctrl-C; SLURM brings a run back

    @cached_property
    def name(self) -> str:
        """The policy's name for people: the name of its run, its checkpoint or its model."""
        if self.run is not None:
            path = self.run.path.resolve()
            return f"{path.parent.name}-{path.name}"
        if self.cfg.checkpoint is None:
            return Path(str(self.cfg.model.name)).name
        folder = Path(self.cfg.checkpoint).expanduser().resolve()
        return f"{folder.parent.parent.name}-{folder.name}" if folder.parent.name == "checkpoints" else folder.name

    @cached_property
    def weights(self) -> dict:
        """Facts that distinguish policies with the same name: a path may hold another policy tomorrow."""
        if self.run is not None:
            return {"run": first_start(self.run)}
        found = weights_digest(self.cfg.model, self.cfg.checkpoint)
        return {} if found is None else {"weights": found}

    # ---- folders

    def folder(self, task: str, checkpoint: Checkpoint) -> EvaluationFolder:
        """Returns the folder for the samples of one policy on one task."""
        path = self.folder_of_all(task)
        return EvaluationFolder(path if checkpoint.step is None else path / f"step-{checkpoint.step:08d}")

    def folder_of_all(self, task: str) -> Path:
        """Returns evaluations_dir/TASK/POLICY-DIGEST, with a digest of everything that samples depend on."""
        name = re.sub(r"[^\w=.,+-]+", "_", self.name)[:100].strip("_")
        return Path(self.cfg.evaluations_dir).expanduser() / task / f"{name}-{digest(self.identity(task))}"

    def identity(self, task: str) -> dict:
        """Returns everything that the samples of a task depend on, which does not include k."""
        cfg = self.configurations[task]
        config = OmegaConf.to_container(cfg, resolve=True)
        config |= {group: kept_keys(config, group) for group in ("task", "model")}
        kept = {key: config[key] for key in ("task", "temperature", "seed", "rollouts_per_batch")}
        kept["samples_together"] = samples_together(cfg.k)
        kept["trainer"] = {key: value for key, value in config["trainer"].items() if key != "use_cpu"}
        kept["rollouts_by"] = {key: value for key, value in config["rollouts_by"].items() if key in OF_A_SAMPLE}
        kept["model"] = {key: value for key, value in config["model"].items() if key not in OF_TRAINING}
        if self.tasks[task].environment is not None:
            kept["sandbox"] = of_sandbox(config)
        return kept | self.weights

    def held(self, step: int) -> Path:
        """Returns the folder that keeps a checkpoint of the run until it is evaluated."""
        command = digest([str(self.folder_of_all(task)) for task in self.configurations])
        return Path(self.cfg.evaluations_dir).expanduser() / ".held" / command / f"step-{step:08d}"

    def release(self) -> None:
        """Removes the held checkpoints of the run; called when all have been evaluated."""
        if self.run is not None:
            shutil.rmtree(self.held(0).parent, ignore_errors=True)
            with suppress(OSError):  # another command may also hold a checkpoint
                self.held(0).parents[1].rmdir()

    # ---- work

    def pending(self) -> bool:
        """Returns whether a sample is missing."""
        pairs = ((task, checkpoint) for checkpoint in self.checkpoints() for task in self.configurations)
        return not all(self.folder(*pair).has(self.cfg.k) for pair in pairs)


def digest(facts) -> str:
    """Returns a hash of anything that JSON can hold, eight hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:8]


def first_start(run: RunDirectory) -> dict:
    """Returns time and host of a run's first start: after overwrite=true the same folder holds another run."""
    name = {"name": run.path.resolve().name}
    try:
        first = json.loads(run.environment_file.read_text(encoding="utf8"))["starts"][0]
    except (FileNotFoundError, KeyError, IndexError):
        return name
    return name | {"started": first["started"], "host": first["host"]}
