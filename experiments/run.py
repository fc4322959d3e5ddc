"""Trains one run, or with -m a sweep of them, in run directories that are skipped, resumed or refused by their state.

python experiments/run.py                                     # tiny policy, arithmetic, OTB, on a CPU
python experiments/run.py -m baseline=otb,grpo group_size=4,32
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read at its import; else 40 lines run over the progress

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.checks import check
from experiments.checks.files import check_files
from experiments.checks.machine import check_this_machine
from experiments.running.build import Run, opened
from experiments.running.command_line import CONF, ending_at_once, exit_codes, refusals, run_hydra
from experiments.running.environment import number_of_processes
from experiments.running.identity import difference, run_path, short_name
from experiments.running.processes import counted, start_processes, starts_processes
from experiments.running.run_lock import RunLock, held_by_this_run, restarts, started_by
from experiments.running.warning_signal import Interrupted, listen, pass_on_ctrl_c
from experiments.sweeps.jobs import JobFile, sweep_arguments
from otb.errors import TRY_AGAIN, RunError, unwritable
from otb.files import write_atomically
from otb.records import RunDirectory, timestamp

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
FROM_KEYBOARD = "stopped from the keyboard"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    overrides, choices = list(hydra_cfg.overrides.task), dict(hydra_cfg.runtime.choices)
    path = run_path(cfg, overrides, choices)
    command = ["python", "experiments/run.py", *(override.lstrip("+") for override in overrides)]
    if hydra_cfg.mode.name == "MULTIRUN":
        name = f"{hydra_cfg.job.num}: {short_name(cfg, choices)}"
        with failing_alone(name), JobFile(Path(hydra_cfg.sweep.dir), hydra_cfg.job.num, path):
            run(check(cfg), path, command, name)
    else:
        with refusals():
            if starts_processes(cfg):
                planned = check(cfg, cfg.gpus)  # what each of them would refuse, said once
                check_this_machine(cfg)
                if not cfg.overwrite:
                    refuse_other_processes(RunDirectory(path), cfg, cfg.gpus)
                if cfg.overwrite or RunDirectory(path).status().get("state") != "finished":
                    check_files(cfg, planned.task, planned.held_out)
                if "SLURM_JOB_ID" in os.environ:
                    listen(pass_on=True)
                else:
                    pass_on_ctrl_c()
                start_processes(cfg, __file__, sys.argv[1:])
            run(check(cfg), path, command)


@contextmanager
def failing_alone(name: str) -> Iterator[None]:
    """Prints why a run of a sweep failed and lets the sweep go on; the table at its end names the run."""
    try:
        yield
    except RunError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except Exception:
        print(f"{name}: {traceback.format_exc()}", file=sys.stderr)


def run(wanted: Run, path: Path, command: list[str], name: str | None = None) -> None:
    """Starts, resumes, continues or skips the run at `path` until it has done its steps. Raises RunError.

    name: what the lines of this run begin with in a sweep; None for a single run, which also gets a table at its end.
    """
    if "SLURM_JOB_ID" in os.environ:
        listen()
    cfg, directory = wanted.cfg, RunDirectory(path)
    is_main = int(os.environ.get("RANK", 0)) == 0
    anew = starts_anew(cfg, directory)
    if not anew and (step := step_finished(directory, cfg)):
        if is_main:
            print(f"{path}: finished at step {step}, nothing to do. steps=N continues it, overwrite=true starts anew.")
        return
    check_files(cfg, wanted.task, wanted.held_out)
    if is_main and anew:
        move_aside(directory)
    if is_main:
        create(directory)
    with RunLock(path) if is_main else nullcontext() as lock:
        if is_main:
            prepare(directory, cfg)
            print(f"run directory: {path}" if name is None else f"{name}: {path}", flush=True)
        train_locked(wanted, directory, lock, command, name)
        if is_main:
            report(directory, cfg.steps, with_table=name is None)
    wait_for_the_others()


def train_locked(
    wanted: Run, directory: RunDirectory, lock: RunLock | None, command: list[str], name: str | None
) -> None:
    """Trains to the end, or notes in status.json why it did not. lock: None in all processes but the first."""
    from experiments.running.progress import Progress

    cfg = wanted.cfg
    with Progress(cfg.steps, name=name, quiet=lock is None) as progress:
        try:
            with opened(wanted.sandbox):
                from experiments.running.train import train  # torch, transformers and trl: seconds, so only now

                train(wanted, directory, lock, command, progress)
        except Interrupted as interruption:
            if lock is not None and may_note(directory, lock):
                why = {} if interruption.code == TRY_AGAIN else {"error": FROM_KEYBOARD}
                directory.write_status("interrupted", step=directory.last_metrics()["step"], steps=cfg.steps, **why)
            wait_for_the_others()
            raise
        except BaseException as error:
            if may_note(directory, lock):
                note_failure(directory, cfg.steps, error)
            if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
                raise unwritable(Path(error.filename or directory.path), error) from error
            raise


def wait_for_the_others() -> None:
    """Returns when every process of the run is here: one that ended earlier could take the first with it too soon."""
    if "WORLD_SIZE" in os.environ:
        from experiments.running.train import wait_for_all_processes

        wait_for_all_processes()


def starts_anew(cfg: DictConfig, directory: RunDirectory) -> bool:
    """Tells whether `overwrite=true` applies: not to a restart of what the same sweep or job has begun anew."""
    if not cfg.overwrite or not directory.config_file.exists():
        return False
    return restarts() == 0 or directory.begun_by() != started_by()  # its first start may have ended before it obeyed


def step_finished(directory: RunDirectory, cfg: DictConfig) -> int:
    """Returns the step that the run stands at where nothing is left to do, else 0.

    Raises RunError where the directory holds another configuration, or a schedule that more steps cannot continue.
    """
    if not directory.config_file.exists():
        return 0
    old, new = (OmegaConf.to_container(config, resolve=True) for config in (OmegaConf.load(directory.config_file), cfg))
    if changed := difference(old, new):
        raise RunError(
            f"{directory.path} holds a run of another configuration (there -> here):\n  "
            + "\n  ".join(changed)
            + "\nOne directory holds one configuration. Use another runs_dir, or overwrite=true, which moves it aside."
        )
    status, reached = directory.status(), max(directory.checkpoint_steps(), default=0)
    if reached >= cfg.steps and (status.get("state") == "finished" or reached > cfg.steps):
        return reached
    if cfg.steps > old["steps"] and not continues(old["trainer"]):
        raise RunError(
            f"steps={cfg.steps} would continue a run of steps={old['steps']}, whose learning rate follows "
            f"{old['trainer']['lr_scheduler_type']} to its end. Use overwrite=true, or the constant schedule (with a "
            "warm-up in whole steps)."
        )
    refuse_other_processes(directory, cfg, int(os.environ.get("WORLD_SIZE", 1)))
    return 0


def continues(trainer: dict) -> bool:
    """Tells whether more steps leave the learning rates of a run's first steps as they were.

    trainer: the group of its configuration. A warm-up below 1 is a share of all steps (transformers.TrainingArguments).
    """
    warm_up = trainer.get("warmup_steps") or 0
    kind = trainer["lr_scheduler_type"]
    return kind == "constant" or (kind == "constant_with_warmup" and (warm_up == 0 or warm_up >= 1))


def refuse_other_processes(directory: RunDirectory, cfg: DictConfig, processes: int) -> None:
    """Raises RunError where the run would go on from a checkpoint that so many processes cannot go on from.

    Every process draws its rollouts from a random state of its own, and shards are as many as the processes that wrote
    them: another number would make another run, and transformers would begin with an empty optimizer without a word.
    """
    if not directory.config_file.exists() or not (step := max(directory.checkpoint_steps(), default=0)):
        return
    sharding = OmegaConf.select(OmegaConf.load(directory.config_file), "parallel.name") or "ddp"
    written_by = number_of_processes(directory) or processes
    if (written_by, sharding) != (processes, cfg.parallel.name):
        raise RunError(
            f"{directory.path} is at step {step} with {counted(written_by)} and parallel={sharding}, and would go on "
            f"with {processes} and parallel={cfg.parallel.name}. A run keeps its processes, and how they share the "
            f"policy. Use gpus={written_by} parallel={sharding} (on SLURM as many tasks), or overwrite=true."
        )


def create(directory: RunDirectory) -> None:
    """Makes the directory and its folders. Raises RunError where this process may not write into them."""
    try:
        for folder in (directory.path, directory.rollouts, directory.evaluations, directory.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise unwritable(Path(error.filename), error) from error


def move_aside(directory: RunDirectory) -> None:
    """Renames the whole directory, so that a kill leaves the old run or none, never parts of it. Raises RunError."""
    aside = directory.path.with_name(f"{directory.path.name}.{timestamp()}")
    if aside.exists():
        raise RunError(f"{aside} exists already: overwrite=true twice within a second. Try again.")
    with RunLock(directory.path):  # refuses while another process writes into it
        os.rename(directory.path, aside)
        (aside / "lock.json").unlink()
    print(f"overwrite=true: the old run is now {aside}")


def prepare(directory: RunDirectory, cfg: DictConfig) -> None:
    """Checks again, as another process may have been here before the lock was held, and writes the configuration."""
    step_finished(directory, cfg)
    directory.clear_unfinished()
    if not directory.config_file.exists():
        directory.note_beginning(started_by())
    write_atomically(directory.config_file, OmegaConf.to_yaml(cfg, resolve=True))
    directory.write_status("running", step=directory.last_metrics().get("step", 0), steps=cfg.steps)


def may_note(directory: RunDirectory, lock: RunLock | None) -> bool:
    """Tells whether the end of this process is that of the run: the first to fail is the cause, the others lose it.

    lock: None in all processes but the first.
    """
    is_ours = held_by_this_run(directory.path) if lock is None else lock.held()
    return is_ours and directory.status().get("state") == "running"


def note_failure(directory: RunDirectory, steps: int, error: BaseException) -> None:
    """Writes into status.json that the run failed, or was interrupted by Ctrl-C, and why."""
    step = directory.last_metrics().get("step", 0)
    stopped = isinstance(error, KeyboardInterrupt)
    state, reason = ("interrupted", FROM_KEYBOARD) if stopped else ("failed", f"{type(error).__name__}: {error}")
    with suppress(RunError):  # a full disk must not hide the error that it caused
        directory.write_status(state, step=step, steps=steps, error=reason)


def report(directory: RunDirectory, steps: int, with_table: bool) -> None:
    """Draws the learning curve and notes that the run is finished; prints the table of a single run."""
    from analysis.run_picture import run_picture

    picture = run_picture(directory)
    directory.write_status("finished", step=steps, steps=steps)
    if with_table:
        from experiments.running.summary import print_table

        print_table([directory.path])
        print(f"run directory: {directory.path}\nlearning curve: {picture}")


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/run.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    if {"--help", "-h"} & set(arguments):
        from experiments.running.help_page import help_page

        print(help_page(), end="")
        return
    with ending_at_once(), exit_codes(after_stop="continues from the last checkpoint"):
        run_hydra(main, __file__, sweep_arguments(arguments), "config")


if __name__ == "__main__":
    command_line(sys.argv[1:])
