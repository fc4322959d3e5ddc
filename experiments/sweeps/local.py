"""A sweep on this machine: each run is a process of its own, a few at a time. hydra/launcher=local uses it.

With GPUs a run is a new process; without, it is the fork of one that has the imports behind it (preloaded.py).

A run that is killed is started again and resumes, up to a limit; one that is refused or crashes is not.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from experiments.running.devices import visible_gpus
from experiments.running.run_lock import (
    RESTARTS_VARIABLE,
    SWEEP_VARIABLE,
    heartbeat_age,
    is_alive,
    restarts,
    started_by,
)
from experiments.running.threads import share_of
from experiments.running.warning_signal import Interrupted, listen, received
from experiments.sweeps.display import SweepDisplay
from experiments.sweeps.jobs import Job, earlier_jobs, may_restart, reason_in, save_jobs
from experiments.sweeps.preloaded import Preloaded
from experiments.sweeps.runs_of import folder_of, plan
from experiments.sweeps.snapshot import take_snapshot
from experiments.sweeps.state import Queued, RunState, state_of
from otb.errors import TRY_AGAIN, RunError
from otb.records.lock_file import read_lock

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 15.0  # for a run to write down that it was stopped

QUEUED_HERE, STARTED_HERE = Queued("", "PENDING"), Queued("", "RUNNING")


def launch(
    loader: ConfigLoader,
    sweep: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    parallel: int | None,
    max_restarts: int,
    wait: bool,
) -> None:
    """Runs the sweep to its end. Raises RunError for options that cannot be meant."""
    check_parallel(parallel)
    if not wait:
        raise RunError("wait=false needs a queue that keeps the runs. Add hydra/launcher=slurm, or use wait=true.")
    jobs = plan(loader, sweep, job_overrides, processes=sweep.gpus or 1, here=True)
    folder = folder_of(sweep)
    earlier_jobs(folder, jobs)  # refuses the folder of another sweep
    save_jobs(folder, jobs)
    LocalSweep(folder, jobs, parallel, max_restarts, sweep.overwrite, sweep.gpus or 1).run()


class Running(NamedTuple):
    """Holds a run that has been started.

    slot: what the run leaves free at its end: a preloaded process, or names of GPUs. position: bytes of its log that an
    earlier start wrote.
    """

    process: subprocess.Popen | Preloaded
    job: Job
    slot: Preloaded | str
    position: int


class LocalSweep:
    """Runs those of `jobs` whose directories are neither finished nor written by another process.

    Args:
        parallel: runs at a time; None for one per GPU, or per core where there is no GPU.
        max_restarts: of a run that is killed, in a row without a new checkpoint.
        gpus_per_run: GPUs that one run trains on; it starts its own processes.
        ended: called with the job of each run that ends well, as soon as it does.
    """

    def __init__(
        self,
        folder: Path,
        jobs: list[Job],
        parallel: int | None,
        max_restarts: int,
        overwrite: bool,
        gpus_per_run: int = 1,
        ended: Callable[[Job], None] | None = None,
    ):
        self.folder, self.jobs, self.max_restarts, self.ended = folder, jobs, max_restarts, ended
        names = visible_gpus()
        whole = range(0, len(names) - gpus_per_run + 1, gpus_per_run)
        gpus = [",".join(names[first : first + gpus_per_run]) for first in whole]  # of one run each
        self.slots = parallel or len(gpus) or len(os.sched_getaffinity(0))
        self.code = take_snapshot(folder / ".code")
        self.logs = folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.environment = self._environment()
        # with more runs than GPUs, several share one
        self.free = [gpus[slot % len(gpus)] for slot in reversed(range(self.slots))] if gpus else self._preloaded()
        self.waiting = [job for job in jobs if job.error is None and (overwrite or not goes_on(job))]
        self.running: list[Running] = []

    def run(self) -> None:
        """Returns at the end of the last run. What failed has its reason in its job file.

        Raises Interrupted after a warning in a SLURM job, when the runs have obeyed it.
        """
        if "SLURM_JOB_ID" in os.environ:
            listen()
        warned = False
        try:
            with SweepDisplay() as display:
                while self.waiting or self.running:
                    if received() and not warned:
                        warned = True
                        self._warn()
                    while self.waiting and self.free:
                        self._start(self.waiting.pop(0))
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    for run in list(self.running):
                        if run.process.poll() is not None:
                            self._end(run)
                    display.show(self._states())
                display.show(self._states())
        except KeyboardInterrupt:
            self._finish_steps()
            raise
        finally:
            for run in self.running:  # after a second Ctrl-C
                try:
                    run.process.wait(SECONDS_TO_END)
                except subprocess.TimeoutExpired:
                    run.process.terminate()
            for slot in (*self.free, *(run.slot for run in self.running)):
                if isinstance(slot, Preloaded):
                    slot.close()
        if received():
            raise Interrupted("a warning signal came; the runs that were under way have written checkpoints")

    def _finish_steps(self) -> None:
        """Waits until the runs, which got the same Ctrl-C from the terminal, have written their checkpoints."""
        self.waiting.clear()
        text = "\nstopping: each run writes a checkpoint after its step; Ctrl-C again ends them at once"
        print(text, file=sys.stderr, flush=True)
        while any(run.process.poll() is None for run in self.running):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _warn(self) -> None:
        """Passes a warning on to the runs, and leaves those that have not begun to the same command."""
        self.waiting.clear()
        for run in self.running:
            run.process.send_signal(signal.SIGUSR2)

    def _states(self) -> list[RunState]:
        # A run is seconds old before its directory is there, and is not missing.
        started = {run.job.number for run in self.running}
        return [
            state_of(job, QUEUED_HERE if job in self.waiting else STARTED_HERE if job.number in started else None)
            for job in self.jobs
        ]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(self.code), os.getenv("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | share_of(self.slots)
        environment[SWEEP_VARIABLE] = started_by() or secrets.token_hex(8)  # a requeued job begins no run twice
        environment["HYDRA_FULL_ERROR"] = "1"  # the error is the last line of the log
        return environment

    def _preloaded(self) -> list[Preloaded]:
        return [Preloaded(self.code, self.environment) for _ in range(self.slots)]

    def _start(self, job: Job) -> None:
        slot, log = self.free.pop(), self._log_of(job)
        own = {RESTARTS_VARIABLE: str(restarts() + job.starts)}
        job.starts += 1
        job.save(self.folder)
        position = log.stat().st_size if log.exists() else 0
        if isinstance(slot, Preloaded):
            slot.start(job.overrides, own, log)
            self.running.append(Running(slot, job, slot, position))
            return
        environment = self.environment | own | {"CUDA_VISIBLE_DEVICES": slot}
        command = [sys.executable, str(self.code / "experiments" / "run.py"), *job.overrides]
        with open(log, "ab") as output:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self.running.append(Running(process, job, slot, position))

    def _log_of(self, job: Job) -> Path:
        return self.logs / f"{job.number:05d}.log"

    def _end(self, run: Running) -> None:
        process, job, slot, position = run
        self.running.remove(run)
        self.free.append(slot)
        if process.returncode == 0:
            if self.ended is not None:
                self.ended(job)
            return
        log = self._log_of(job)
        job.error = reason_in(log.read_bytes()[position:].decode(errors="replace"))
        if process.returncode < 0:
            job.error = f"killed by signal {-process.returncode}; {job.error}"
            if may_restart(job, self.max_restarts) and not received():
                job.error = None
                self.waiting.insert(0, job)
        elif process.returncode == TRY_AGAIN:
            job.error = "interrupted by a warning signal; the same command goes on"
        job.save(self.folder)


def goes_on(job: Job) -> bool:
    """Tells whether there is nothing to start: the run is done, or another process holds its lock."""
    lock = Path(job.run) / "lock.json"
    return state_of(job).state == "done" or (lock.exists() and is_alive(read_lock(lock), heartbeat_age(lock)))


def check_parallel(parallel: int | None) -> None:
    """Raises RunError for a number of runs at a time that cannot be meant."""
    if parallel is not None and (type(parallel) is not int or parallel < 1):
        raise RunError(
            f"hydra.launcher.parallel={parallel} must be a whole number of at least 1, or null for one run per GPU or "
            "core. Try hydra.launcher.parallel=2."
        )
