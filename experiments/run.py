"""Trains one run, or with -m a sweep of them, in run directories that are skipped, resumed or refused by their state.

python experiments/run.py                                     # tiny policy, arithmetic, OTB, on a CPU
python experiments/run.py -m baseline=otb,grpo group_size=4,32
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two shared cores make a step 4 times slower

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import settings
from otb.records import RunDirectory, RunError, timestamp, write_atomically
from otb.run_lock import RunLock


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    in_sweep = hydra_cfg.mode.name == "MULTIRUN"
    path = settings.run_path(cfg, list(hydra_cfg.overrides.task), dict(hydra_cfg.runtime.choices))
    if in_sweep:
        Path(hydra_cfg.sweep.dir).mkdir(parents=True, exist_ok=True)
        (Path(hydra_cfg.sweep.dir) / f"job-{hydra_cfg.job.num:05d}.txt").write_text(str(path))
    command = ["python", "experiments/run.py", *hydra_cfg.overrides.task]
    try:
        settings.check(cfg)
        run(cfg, path, command, in_sweep)
    except RunError as error:
        print(f"{path.name}: {error}" if in_sweep else f"error: {error}", file=sys.stderr)
        if not in_sweep:  # a run of a sweep fails alone; the summary names it
            sys.exit(2)


def run(cfg: DictConfig, path: Path, command: list[str], in_sweep: bool = False) -> None:
    """Brings the run at `path` to `cfg.steps`: starts, resumes, continues or skips it. Raises RunError."""
    directory = RunDirectory(path)
    is_main = int(os.environ.get("RANK", 0)) == 0
    if is_finished(directory, cfg):
        step = directory.status()["step"]
        print(f"{path}: finished at step {step}; overwrite=true starts anew, more steps continue it.")
        return
    if is_main:
        create(directory)
    with RunLock(path) if is_main else nullcontext() as lock:
        if is_main:
            prepare(directory, cfg)
        from experiments.progress import Progress
        from experiments.train import train  # torch, transformers and trl: seconds, so only now

        with Progress(cfg.steps, name=path.name if in_sweep else None, quiet=not is_main) as progress:
            try:
                train(cfg, directory, lock, command, progress)
            except BaseException as error:
                if is_main and (lock is None or lock.held()):
                    step, reason = directory.last_metrics().get("step", 0), f"{type(error).__name__}: {error}"
                    directory.write_status("failed", step=step, steps=cfg.steps, error=reason)
                raise
        if is_main:
            report(directory, in_sweep)


def is_finished(directory: RunDirectory, cfg: DictConfig) -> bool:
    """Whether nothing is left to do. Raises RunError where the directory holds another configuration."""
    if cfg.overwrite or not directory.config_file.exists():
        return False
    old, new = OmegaConf.load(directory.config_file), cfg
    old, new = (OmegaConf.to_container(config, resolve=True) for config in (old, new))
    if changed := settings.difference(old, new):
        raise RunError(
            f"{directory.path} holds a run of another configuration:\n  "
            + "\n  ".join(changed)
            + "\nUse another runs_dir, or overwrite=true, which moves it aside."
        )
    status = directory.status()
    finished = status.get("state") == "finished" and status["step"] >= cfg.steps
    if not finished and cfg.steps > old["steps"] and not old["trainer"]["lr_scheduler_type"].startswith("constant"):
        raise RunError(
            f"steps={cfg.steps} would continue a run of steps={old['steps']}, whose learning rate followed "
            f"{old['trainer']['lr_scheduler_type']} to the end. Use overwrite=true, or the constant schedule."
        )
    return finished


def create(directory: RunDirectory) -> None:
    try:
        for folder in (directory.path, directory.rollouts, directory.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory.path} cannot be created: {error.strerror}. Choose another runs_dir.") from error


def prepare(directory: RunDirectory, cfg: DictConfig) -> None:
    """With the lock held: moves an old run aside if asked, checks again, writes the configuration."""
    if cfg.overwrite and directory.metrics_file.exists():
        aside = directory.path.with_name(f"{directory.path.name}.{timestamp()}")
        aside.mkdir()
        for item in directory.path.iterdir():
            if item.name != "lock.json":
                item.rename(aside / item.name)
        create(directory)
        print(f"{directory.path}: the old run is in {aside}")
    is_finished(directory, cfg)  # another process may have started it while this one waited for nothing
    directory.clear_unfinished()
    write_atomically(directory.config_file, OmegaConf.to_yaml(cfg, resolve=True))
    directory.write_status("running", step=directory.last_metrics().get("step", 0), steps=cfg.steps)


def report(directory: RunDirectory, in_sweep: bool) -> None:
    """Learning curve beside the records; for a single run also the table and where everything is."""
    from analysis.learning_curves import run_picture

    picture = run_picture(directory)
    if not in_sweep:
        from rich.console import Console

        from experiments.summary import summary_table

        Console(soft_wrap=True).print(summary_table([directory.path]))
        print(f"run directory: {directory.path}\nlearning curve: {picture}")


if __name__ == "__main__":
    sys.argv[1:] = settings.accept_open_keys(sys.argv[1:])
    try:
        settings.refuse_unknown_choices(sys.argv[1:])
    except RunError as error:
        sys.exit(f"error: {error}")
    main()
