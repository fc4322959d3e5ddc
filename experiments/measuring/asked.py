"""What the commands that measure a policy are asked for: estimators, a checkpoint, a folder. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from experiments.running.command_line import CONF, near_miss
from experiments.running.identity import kept_keys, of_sandbox, weights_digest
from otb.errors import RunError
from otb.tasks import Task


def shipped_estimators() -> list[str]:
    """Returns the names of all files of conf/baseline."""
    return sorted(path.stem for path in (CONF / "baseline").glob("*.yaml"))


def asked_estimators(cfg: DictConfig, known: list[str]) -> list[str]:
    """Returns the names in `estimators`, `known` where it is null. Raises RunError for one that is no baseline."""
    if cfg.estimators is None:
        return known
    asked = OmegaConf.to_container(cfg)["estimators"]
    asked = asked if isinstance(asked, list) else [str(asked)]
    shipped = shipped_estimators()
    for name in asked:
        if name not in shipped:
            raise RunError(f"estimators: {name} is not a baseline.{near_miss(name, shipped)} Known: {shipped}.")
    return asked


def check_checkpoint(cfg: DictConfig) -> None:
    """Raises RunError where `checkpoint` is no folder."""
    if cfg.checkpoint is not None and not Path(str(cfg.checkpoint)).expanduser().is_dir():
        raise RunError(f"checkpoint={cfg.checkpoint} is not a folder. Give RUN/checkpoints/step-XXXXXXXX.")


def measurement_folder(
    cfg: DictConfig, task: Task, choices: dict[str, str], kind: str, measurement: tuple[str, ...]
) -> Path:
    """Returns runs_dir/KIND/TASK-MODEL[-STEP]-DIGEST. measurement: the keys that what is measured depends on."""
    config = OmegaConf.to_container(cfg, resolve=True)
    identity = {key: config[key] for key in measurement} | {key: kept_keys(config, key) for key in ("task", "model")}
    identity["checkpoint"] = weights_digest(cfg.model, cfg.checkpoint)
    if task.environment is not None:
        identity["sandbox"] = of_sandbox(config)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    checkpoint = [] if cfg.checkpoint is None else [Path(cfg.checkpoint).name]
    return Path(cfg.runs_dir) / kind / "-".join([choices["task"], choices["model"], *checkpoint, digest])
