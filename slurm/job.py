"""Watches over one run of a sweep inside a SLURM job: python -m slurm.job FOLDER SUBMISSION. Imports no torch.

It starts the run's processes with srun. When they end, it decides: the run is done; or it has failed, and the job file
gets the reason; or a process was killed, and the run is restarted here; or a warning signal came or the time is up, and
the job goes back into the queue. SLURM itself signals the processes of the run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from experiments.running.run_lock import RESTARTS_VARIABLE, SWEEP_VARIABLE
from experiments.running.warning_signal import WARNING_VARIABLE
from experiments.sweeps.jobs import Job, load_job, may_restart, reason_in
from otb.errors import CRASHED, TRY_AGAIN
from slurm.controller import end_time, job_facts, requeue

POLL_SECONDS = 0.5
KILLED = -1  # instead of an exit code: a signal ended a process
LAST_SECONDS = 10.0  # before the time limit, when the job goes back into the queue whatever the run is doing
SLURM_ROUNDS = 60.0  # seconds by which a warning signal may come early
WARNINGS = ("Terminated", "User defined signal 2")  # a warning signal ended a process that did not handle it yet
TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)")
EXITED = re.compile(r"Exited with exit code (\d+)")
# Errors of a process that only lost contact with another one.
LOST_ANOTHER = re.compile("closed by peer|reset by peer|DistBackendError|DistNetworkError|ncclRemoteError")


class Supervisor:
    """Watches over one job of a job array."""

    def __init__(self, folder: Path, token: str):
        self.folder = folder
        self.submission = json.loads((folder / "submissions" / f"{token}.json").read_text(encoding="utf8"))
        self.options = self.submission["options"]
        self.id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        self.job: Job = load_job(folder, self.submission["numbers"][int(os.environ["SLURM_ARRAY_TASK_ID"])])
        self.started = time.time()
        self.ends = end_time(job_facts(self.id)) or self.started + 60 * self.options["timeout_min"]
        self.processes = self.options["nodes"] * self.options["tasks_per_node"]

    def run(self) -> int:
        """Watches until the run is done, has failed, or must go back into the queue. Returns the job's exit code.

        0: the run is done; TRY_AGAIN: the job is back in the queue; otherwise the code of the process that failed.
        """
        for number in (signal.SIGTERM, signal.SIGUSR2):  # the run's processes get them too; this process waits for them
            signal.signal(number, lambda *_: None)
        self.job.job = self.id
        while True:
            self.job.starts += 1
            self.job.error = None
            self.job.save(self.folder)
            code, reason = self._attempt()
            if code == 0:
                return 0
            state = job_facts(self.id).get("JobState", "RUNNING")
            if code == TRY_AGAIN or state != "RUNNING":  # SLURM ended the processes, whatever their codes
                return self._requeue(state)
            if code == KILLED and may_restart(self.job, self.options["max_restarts"]):
                print(f"{reason}; restarting ({self.job.kills} in a row)", flush=True)
                continue
            return self._fail(reason, max(code, CRASHED))

    def _attempt(self) -> tuple[int, str]:
        """Starts the processes and waits. Returns the exit code of the first that failed, or KILLED, and the reason."""
        srun_log = self.folder / "logs" / f"{self.id}_srun.log"
        before = {file: file.stat().st_size for file in (self.folder / "logs").glob(f"{self.id}_*")}
        with open(srun_log, "ab") as errors:
            srun = subprocess.Popen(self._command(), env=self._environment(), stderr=errors, stdin=subprocess.DEVNULL)
            while srun.poll() is None:
                if time.time() > self.ends - LAST_SECONDS:
                    return TRY_AGAIN, "its time is up"
                time.sleep(POLL_SECONDS)
        if srun.returncode == 0:
            return 0, ""
        printed = new_text(srun_log, before)
        cause = self._cause(printed, before)
        print(printed, end="", flush=True)  # appended to the log of the first process, which has now been read
        return cause

    def _cause(self, printed: str, before: dict[Path, int]) -> tuple[int, str]:
        """Returns the exit code and the reason of the process that failed first, according to srun's output.

        srun ended the others. A process that reports only lost contact with another one is not the cause.
        """
        ended = list(TASK_ENDED.finditer(printed))
        if not ended:
            return KILLED, f"srun could not run it: {printed.strip()}"
        how = ended[0]["how"]
        if not EXITED.match(how):
            return (TRY_AGAIN if how.startswith(WARNINGS) else KILLED), self._where(ended[0]) + how
        failures = []
        for line in ended:
            if exited := EXITED.match(line["how"]):
                for rank in ranks(line["ranks"]):
                    log = self.folder / "logs" / f"{self.id}_{rank}_log.out"
                    failures.append((int(exited[1]), self._where(line, rank) + reason_in(new_text(log, before))))
        return next((failure for failure in failures if not LOST_ANOTHER.search(failure[1])), failures[0])

    def _where(self, ended: re.Match, rank: int | None = None) -> str:
        rank = ranks(ended["ranks"])[0] if rank is None else rank
        return f"rank {rank} on {ended['host']}: " if self.processes > 1 else ""

    def _command(self) -> list[str]:
        nodes, tasks = str(self.options["nodes"]), str(self.processes)
        words = ["srun", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={tasks}", "--unbuffered"]
        if self.options["cpus_per_task"]:  # since SLURM 22.05 srun does not inherit it from the job
            words.append(f"--cpus-per-task={self.options['cpus_per_task']}")
        words += [f"--output={self.folder}/logs/{self.id}_%t_log.out", "--open-mode=append", *self.options["srun_args"]]
        script = f"{self.submission['code']}/experiments/run.py"
        rank = [self.submission["python"], "-P", "-m", "slurm.rank", script]
        return [*words, *self.options["container"], *rank, *self.job.overrides]

    def _environment(self) -> dict[str, str]:
        first = "127.0.0.1" if self.options["nodes"] == 1 else socket.gethostname()
        port = 20_000 + int(os.environ["SLURM_JOB_ID"]) % 20_000  # jobs that share a node have different ids
        facts = {"MASTER_ADDR": first, "MASTER_PORT": str(port), "HYDRA_FULL_ERROR": "1"}  # the error is the last line
        # Unlike SLURM_RESTART_COUNT, it also counts restarts within a job. The run's lock and overwrite=true use it.
        facts[RESTARTS_VARIABLE] = str(self.job.starts - 1)
        facts[SWEEP_VARIABLE] = self.submission["sweep"]
        facts[WARNING_VARIABLE] = str(self.options["signal_delay_s"])
        return os.environ | facts

    def _requeue(self, state: str) -> int:
        """Puts the job back into the queue, unless SLURM is already requeueing or cancelling it."""
        self.job.save(self.folder)
        if state != "RUNNING":
            return TRY_AGAIN
        limit = self.options["max_num_timeout"]
        if time.time() > self.ends - self.options["signal_delay_s"] - SLURM_ROUNDS:
            self.job.timeouts += 1
            if self.job.timeouts > limit:
                return self._fail(
                    f"out of time {self.job.timeouts} times; max_num_timeout={limit} is reached. The same command "
                    "resumes from the last checkpoint."
                )
        self.job.save(self.folder)
        print(f"back into the queue at {time.strftime('%F %T')}", flush=True)
        requeue(self.id)
        return TRY_AGAIN

    def _fail(self, reason: str, code: int = CRASHED) -> int:
        self.job.error = reason
        self.job.save(self.folder)
        print(f"failed: {reason}", flush=True)
        return code


def ranks(text: str) -> list[int]:
    """Returns the ranks in srun's notation: `0,2-3` -> [0, 2, 3]."""
    spans = [part.split("-") for part in text.split(",") if part]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def new_text(file: Path, before: dict[Path, int]) -> str:
    """Returns the text added to a log since its size was recorded in `before`."""
    if not file.exists():
        return ""
    with open(file, "rb") as opened:
        opened.seek(before.get(file, 0))
        return opened.read().decode(errors="replace")


def main(folder: Path, token: str) -> int:
    """Runs the job that SLURM's environment names and returns its exit code."""
    submission = json.loads((folder / "submissions" / f"{token}.json").read_text(encoding="utf8"))
    os.chdir(submission["directory"])
    return Supervisor(folder, token).run()


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2])
    # Not sys.exit: a SIGTERM during Python's clean-up would end the process, and the shell would see it as killed.
    os._exit(code)
