"""A lock file with a heartbeat lets one process at a time write a run directory, on network file systems too.

experiments/run.py takes it before anything is written. Advisory locks are not used: they do not cross every network
file system, and a lock left behind by SIGKILL must not keep a run from being resumed. The heartbeat is the file's
modification time, judged by the file system's own clock: the clocks of two hosts may differ by more than a heartbeat.

Not filelock.SoftFileLease (4.2.11): it takes a dead holder's lock by exchanging two names, which NFS refuses, so that
the lock would stay for ever; it never takes an empty lock file, and another host's only after watching it for a lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import uuid
from pathlib import Path

import psutil

from otb.errors import RunError, unwritable
from otb.records.lock_file import has_process, is_here, machine, read_lock

HEARTBEAT_SECONDS = 10.0
DEAD_AFTER_SECONDS = 60.0  # of silence, for a holder on another host
# How often this run was started before, in its sweep or its job, and a name of that sweep; slurm/job.py and
# sweeps/local.py set them.
RESTARTS_VARIABLE = "OTB_RESTARTS"
SWEEP_VARIABLE = "OTB_SWEEP"


class RunLock:
    """Holds a directory: `with RunLock(directory):` raises RunError at once where another process does, and names it.

    A holder on this host is dead when its process is gone; one on another host when its heartbeat stopped, or when it
    was an earlier start of this very SLURM job.
    """

    def __init__(self, directory: Path):
        self.file = Path(directory) / "lock.json"
        self.token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        try:
            self._acquire()
        except OSError as error:
            raise unwritable(self.file.parent, error) from error
        self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if self.held():
            with contextlib.suppress(OSError):  # a dead process's lock is taken over anyway
                self.file.unlink(missing_ok=True)

    def held(self) -> bool:
        """Tells whether the file on disk still names this process."""
        return read_lock(self.file).get("token") == self.token

    def _acquire(self) -> None:
        aside = self.file.with_name(f".{self.file.name}.{self.token}")
        try:
            aside.write_text(json.dumps({"token": self.token} | this_process()) + "\n", encoding="utf8")
            while True:
                try:
                    os.link(aside, self.file)  # creates the whole file or fails, on network file systems too
                    return
                except FileExistsError:
                    self._remove_if_dead()
        finally:
            aside.unlink(missing_ok=True)

    def _remove_if_dead(self) -> None:
        holder, age = read_lock(self.file), heartbeat_age(self.file)
        if is_alive(holder, age):
            raise RunError(
                f"{self.file.parent} is in use by process {holder.get('pid')} on {holder.get('host')} (heartbeat "
                f"{age:.0f} s ago); one process may write a run. Wait for it, stop it, or use another seed or runs_dir."
            )
        aside = self.file.with_name(f".{self.file.name}.{self.token}.dead")
        try:
            os.rename(self.file, aside)
        except FileNotFoundError:
            return  # another process was faster
        # Another process may have put its own lock in the dead one's place meanwhile: give it back. Should a third have
        # taken the empty place, that one stays, and the second stops at its next step.
        if read_lock(aside).get("token") != holder.get("token"):
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.file)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that fails now may answer the next time
                if not self.held():
                    return  # another process took this one for dead; the trainer sees it before its next row
                os.utime(self.file)


def this_process() -> dict:
    """Returns what a lock says of its holder."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": process.pid,
        "process_started": process.create_time(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "job_restarts": restarts(),
        "meets_at": meeting_point(),
    }


def meeting_point() -> str | None:
    """Returns where the processes of this run find each other, which no other run has; None for a run of one."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{address}:{port}" if port else None


def held_by_this_run(directory: Path) -> bool:
    """Tells whether the first process of this very run holds the lock; asked by the others, which hold none."""
    return meeting_point() is not None and read_lock(directory / "lock.json").get("meets_at") == meeting_point()


def restarts() -> int:
    """Returns how often this run was started before; a job that no launcher of ours made is counted by SLURM."""
    return int(os.environ.get(RESTARTS_VARIABLE) or os.environ.get("SLURM_RESTART_COUNT") or 0)


def started_by() -> str | None:
    """Names the sweep or the job of the user's own that this run is started by, and started again; None without one."""
    return os.environ.get(SWEEP_VARIABLE) or os.environ.get("SLURM_JOB_ID")


def heartbeat_age(file: Path) -> float:
    """Returns the seconds since the last heartbeat by the file system's clock; 0 where the lock has just gone."""
    probe = file.with_name(f".{file.name}.{uuid.uuid4().hex}.now")
    probe.touch()
    try:
        return max(0.0, probe.stat().st_mtime - file.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def is_alive(holder: dict, age: float) -> bool:
    """Tells whether the process that a lock names may still write. age: seconds since its heartbeat."""
    if not holder:
        return False  # the lock has gone
    if is_here(holder):
        return has_process(holder)
    me = this_process()
    if me["job"] is not None and holder.get("job") == me["job"] and holder.get("job_restarts", 0) < me["job_restarts"]:
        return False  # SLURM requeued this job, so its earlier start has ended
    return age < DEAD_AFTER_SECONDS
