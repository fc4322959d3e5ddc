"""Trains one run, or with -m a sweep of them, in run directories that are skipped, resumed or refused by their state.

python experiments/run.py                                     # tiny policy, arithmetic, OTB, on a CPU
python experiments/run.py -m baseline=otb,grpo group_size=4,32
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two shared cores make a step 4 times slower

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import settings
from experiments.run_lock import RunLock
from experiments.sweeps.jobs import JobFile, sweep_arguments
from experiments.warning_signal import EXIT_CODE, Interrupted, listen
from otb.errors import RunError, unwritable
from otb.records import RunDirectory, timestamp, write_atomically

REFUSED, INTERRUPTED = 2, 130  # exit codes; 1 is a crash
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@hydra.main(version_base="1.3", config_path=str(settings.CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    in_sweep = hydra_cfg.mode.name == "MULTIRUN"
    path = settings.run_path(cfg, list(hydra_cfg.overrides.task), dict(hydra_cfg.runtime.choices))
    command = ["python", "experiments/run.py", *(override.lstrip("+") for override in hydra_cfg.overrides.task)]
    job = JobFile(Path(hydra_cfg.sweep.dir), hydra_cfg.job.num, path) if in_sweep else nullcontext()
    name = f"{hydra_cfg.job.num}: {settings.short_name(cfg, hydra_cfg.runtime.choices)}" if in_sweep else None
    try:
        with job:
            settings.check(cfg)
            run(cfg, path, command, name)
    except RunError as error:
        print(f"{name}: {error}" if in_sweep else f"error: {error}", file=sys.stderr)
        if not in_sweep:  # a run of a sweep fails alone; the summary names it
            sys.exit(REFUSED)
    except Exception:
        if not in_sweep:
            raise
        print(f"{name}: {traceback.format_exc()}", file=sys.stderr)


def run(cfg: DictConfig, path: Path, command: list[str], name: str | None = None) -> None:
    """Brings the run at `path` to `cfg.steps`: starts, resumes, continues or skips it. Raises RunError.

    name: what the lines of this run begin with in a sweep; None for a single run, which also gets a table at its end.
    """
    if "SLURM_JOB_ID" in os.environ:
        listen()
    directory = RunDirectory(path)
    is_main = int(os.environ.get("RANK", 0)) == 0
    anew = starts_anew(cfg, directory)
    if not anew and (step := step_finished(directory, cfg)):
        if is_main:
            print(f"{path}: finished at step {step}, nothing to do. steps=N continues it, overwrite=true starts anew.")
        return
    if is_main and anew:
        move_aside(directory)
    if is_main:
        create(directory)
    with RunLock(path) if is_main else nullcontext() as lock:
        if is_main:
            prepare(directory, cfg)
        from experiments.progress import Progress

        with Progress(cfg.steps, name=name, quiet=not is_main) as progress:
            try:
                with settings.opened_sandbox(cfg) as sandbox:
                    from experiments.train import train  # torch, transformers and trl: seconds, so only now

                    train(cfg, directory, lock, command, progress, sandbox)
            except Interrupted:
                if is_main and lock.held():
                    directory.write_status("interrupted", step=directory.last_metrics()["step"], steps=cfg.steps)
                raise
            except BaseException as error:
                if is_main and lock.held():
                    note_failure(directory, cfg.steps, error)
                if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
                    raise unwritable(Path(error.filename or path), error) from error
                raise
        if is_main:
            report(directory, cfg.steps, with_table=name is None)


def starts_anew(cfg: DictConfig, directory: RunDirectory) -> bool:
    """Whether `overwrite=true` applies: to the first start of a SLURM job, not to the starts after a preemption."""
    requeued = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
    return cfg.overwrite and not requeued and directory.config_file.exists()


def step_finished(directory: RunDirectory, cfg: DictConfig) -> int:
    """The step that the run stands at where nothing is left to do, else 0.

    Raises RunError where the directory holds another configuration, or a schedule that more steps cannot continue.
    """
    if not directory.config_file.exists():
        return 0
    old, new = (OmegaConf.to_container(config, resolve=True) for config in (OmegaConf.load(directory.config_file), cfg))
    if changed := settings.difference(old, new):
        raise RunError(
            f"{directory.path} holds a run of another configuration (there -> here):\n  "
            + "\n  ".join(changed)
            + "\nOne directory holds one configuration. Use another runs_dir, or overwrite=true, which moves it aside."
        )
    status, reached = directory.status(), max(directory.checkpoint_steps(), default=0)
    if reached >= cfg.steps and (status.get("state") == "finished" or reached > cfg.steps):
        return reached
    if cfg.steps > old["steps"] and not old["trainer"]["lr_scheduler_type"].startswith("constant"):
        raise RunError(
            f"steps={cfg.steps} would continue a run of steps={old['steps']}, whose learning rate follows "
            f"{old['trainer']['lr_scheduler_type']} to its end. Use overwrite=true, or the constant schedule."
        )
    return 0


def create(directory: RunDirectory) -> None:
    try:
        for folder in (directory.path, directory.rollouts, directory.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise unwritable(Path(error.filename), error) from error


def move_aside(directory: RunDirectory) -> None:
    """Renames the whole directory, so that a kill leaves the old run or none, never parts of it."""
    aside = directory.path.with_name(f"{directory.path.name}.{timestamp()}")
    if aside.exists():
        raise RunError(f"{aside} exists already: overwrite=true twice within a second. Try again.")
    with RunLock(directory.path):  # nobody is writing into it
        os.rename(directory.path, aside)
        (aside / "lock.json").unlink()
    print(f"overwrite=true: the old run is now {aside}")


def prepare(directory: RunDirectory, cfg: DictConfig) -> None:
    """With the lock held: checks again, as another process may have been here, and writes the configuration."""
    step_finished(directory, cfg)
    directory.clear_unfinished()
    write_atomically(directory.config_file, OmegaConf.to_yaml(cfg, resolve=True))
    directory.write_status("running", step=directory.last_metrics().get("step", 0), steps=cfg.steps)


def note_failure(directory: RunDirectory, steps: int, error: BaseException) -> None:
    step = directory.last_metrics().get("step", 0)
    reason = "stopped from the keyboard" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    with suppress(RunError):  # a full disk must not hide the error that it caused
        directory.write_status("failed", step=step, steps=steps, error=reason)


def report(directory: RunDirectory, steps: int, with_table: bool) -> None:
    """Learning curve beside the records, then the run is finished; prints the table of a single run."""
    from analysis.run_picture import run_picture

    picture = run_picture(directory)
    directory.write_status("finished", step=steps, steps=steps)
    if with_table:
        from experiments.summary import print_table

        print_table([directory.path])
        print(f"run directory: {directory.path}\nlearning curve: {picture}")


def command_line(arguments: list[str]) -> None:
    """`python experiments/run.py ARGUMENTS`. Exits with 2 for what is refused, 130 after Ctrl-C, 1 after a crash."""
    try:
        sys.argv = [str(Path(__file__)), *settings.accept_open_keys(sweep_arguments(arguments))]
        settings.refuse_unknown_choices(sys.argv[1:])
        main()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except Interrupted as interruption:
        print(f"{interruption}; the same command goes on from it", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    command_line(sys.argv[1:])
