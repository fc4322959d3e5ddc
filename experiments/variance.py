"""Measures variance, bias and noise-to-signal of every estimator's gradient, with the variance laboratory.

python experiments/variance.py quick=true                              # under 4 minutes on two cores
python experiments/variance.py task=arithmetic_tools
python experiments/variance.py checkpoint=runs/.../checkpoints/step-00000040
Each prompt's measurements are saved at once: the same command resumes after a kill, and measures nothing twice when
`estimators` or `group_sizes` (with the same largest) change. docs/variance.md defines the measures and gives results.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import checks
from experiments.checks.files import check_files, check_training_rows
from experiments.checks.values import check_numbers, check_true_or_false, whole_number
from experiments.running.build import opened
from experiments.running.command_line import CONF, exit_codes, near_miss, refusals, run_hydra
from experiments.running.identity import kept_keys, of_sandbox, weights_digest
from experiments.running.run_lock import RunLock
from otb.errors import RunError
from otb.files import write_atomically
from otb.sandbox import Sandbox
from otb.tasks import Task

QUICK = {"group_sizes": [4, 8], "prompts": 12, "samples": 64, "oracle.prompts": 4, "oracle.rollouts": 2}
MEASUREMENT = ("task", "model", "checkpoint", "temperature", "seed", "sketch")  # keys that measurements depend on
NUMBERS = {
    "prompts": whole_number(2),
    "samples": whole_number(4),
    "sketch": whole_number(16),
    **dict.fromkeys(("fit_steps", "prompts_per_step", "partitions", "oracle.rollouts"), whole_number(1)),
    **dict.fromkeys(("seed", "oracle.prompts"), whole_number(0)),
    "oracle.continuations": whole_number(2),
    "workers": whole_number(1, null="null for one per core"),
}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="variance")
def main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    with refusals():
        check_true_or_false(cfg, "quick")
        apply_quick(cfg, typed=[override.lstrip("+").split("=")[0] for override in hydra_cfg.overrides.task])
        names, task, sandbox = check(cfg)
        measure(cfg, names, task, sandbox, directory(cfg, task, hydra_cfg.runtime.choices))


def measure(cfg: DictConfig, names: list[str], task: Task, sandbox: Sandbox | None, folder: Path) -> None:
    """Measures what is missing in `folder` and reports the results. names: the estimators. Raises RunError."""
    check_files(cfg, task, {})
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder), opened(sandbox):
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        from experiments.measuring.laboratory import laboratory  # takes seconds: torch, transformers, trl

        laboratory(cfg, names, folder, task, sandbox)
    print(f"{folder}: {time.monotonic() - started:.0f} s")


def apply_quick(cfg: DictConfig, typed: list[str]) -> None:
    """Sets the smaller numbers of `quick=true`, except for keys that were typed."""
    for key, value in QUICK.items() if cfg.quick else ():
        if key not in typed:
            OmegaConf.update(cfg, key, value)


def check(cfg: DictConfig) -> tuple[list[str], Task, Sandbox | None]:
    """Returns the estimators' names, the task, and the sandbox of a task with tools.

    Raises RunError for what cannot be measured as written.
    """
    check_numbers(cfg, NUMBERS)
    sizes = OmegaConf.to_container(cfg)["group_sizes"]
    if not isinstance(sizes, list) or not sizes or not all(type(n) is int and 2 <= n <= cfg.samples / 2 for n in sizes):
        raise RunError(
            f"group_sizes={sizes} must be whole numbers from 2 to samples / 2 = {cfg.samples // 2}, because a variance "
            "needs two groups. Try group_sizes=[4,8]."
        )
    if cfg.oracle.continuations % 2:
        raise RunError(
            f"oracle.continuations={cfg.oracle.continuations} must be even, because each half makes an estimate. Try "
            f"oracle.continuations={cfg.oracle.continuations + 1}."
        )
    if cfg.checkpoint is not None and not Path(str(cfg.checkpoint)).expanduser().is_dir():
        raise RunError(f"checkpoint={cfg.checkpoint} is not a folder. Give RUN/checkpoints/step-XXXXXXXX.")
    names = estimators(cfg)
    task, sandbox = checks.check_policy_and_task(cfg)
    check_training_rows(task)
    return names, task, sandbox


def estimators(cfg: DictConfig) -> list[str]:
    """Returns the names of the estimators: rloo and energy_probe, which all are compared with, and those asked for."""
    known = sorted(path.stem for path in (CONF / "baseline").glob("*.yaml"))
    asked = known if cfg.estimators is None else OmegaConf.to_container(cfg)["estimators"]
    asked = asked if isinstance(asked, list) else [str(asked)]
    for name in asked:
        if name not in known:
            raise RunError(f"estimators: {name} is not a baseline.{near_miss(name, known)} Known: {known}.")
    return list(dict.fromkeys(["rloo", "energy_probe", *asked]))


def directory(cfg: DictConfig, task: Task, choices: dict[str, str]) -> Path:
    """Returns runs_dir/variance/TASK-MODEL[-STEP]-DIGEST, with a digest of everything that measurements depend on."""
    config = OmegaConf.to_container(cfg, resolve=True)
    identity = {key: config[key] for key in MEASUREMENT} | {key: kept_keys(config, key) for key in ("task", "model")}
    identity["checkpoint"] = weights_digest(cfg.model, cfg.checkpoint)
    if task.environment is not None:
        identity["sandbox"] = of_sandbox(config)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    checkpoint = [] if cfg.checkpoint is None else [Path(cfg.checkpoint).name]
    return Path(cfg.runs_dir) / "variance" / "-".join([choices["task"], choices["model"], *checkpoint, digest])


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/variance.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    with exit_codes(after_stop="continues with the missing measurements"):
        run_hydra(main, __file__, arguments, "variance")


if __name__ == "__main__":
    command_line(sys.argv[1:])
