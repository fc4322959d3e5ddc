"""One process per run directory: a lock file with a heartbeat, which also decides on network file systems.

Taken by experiments/run.py before anything is written. Advisory locks are not used: they do not cross every network
file system, and a lock left behind by SIGKILL must not keep a run from being resumed. The heartbeat is the file's
modification time, judged by the file system's own clock: the clocks of two hosts may differ by more than a heartbeat.
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

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # a holder on another host is taken for dead after this silence


class RunLock:
    """`with RunLock(directory):` holds the directory or raises RunError at once, naming the process that holds it.

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
        """Whether the file on disk still names this process."""
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
                    return  # somebody took this process for dead; the trainer sees it before its next row
                os.utime(self.file)


def this_process() -> dict:
    """What a lock says of its holder."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": process.pid,
        "process_started": process.create_time(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "job_restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
    }


def machine() -> str:
    """Where a process id means one process: this boot of this kernel, this container. Host names can be shared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def read_lock(file: Path) -> dict:
    """The lock's facts; {} where there is none."""
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def heartbeat_age(file: Path) -> float:
    """Seconds since the last heartbeat by the file system's clock; 0 where the lock has just gone."""
    probe = file.with_name(f".{file.name}.{uuid.uuid4().hex}.now")
    probe.touch()
    try:
        return max(0.0, probe.stat().st_mtime - file.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def is_alive(holder: dict, age: float) -> bool:
    """Whether the process that a lock names may still write. age: seconds since its heartbeat."""
    if not holder:
        return False  # the lock has gone
    if holder.get("machine") == machine():
        try:  # a recycled process id has another start time
            return abs(psutil.Process(holder["pid"]).create_time() - holder["process_started"]) < 1.0
        except psutil.NoSuchProcess:
            return False
    me = this_process()
    if me["job"] is not None and holder.get("job") == me["job"] and holder.get("job_restarts", 0) < me["job_restarts"]:
        return False  # SLURM requeued this job, so its earlier start has ended
    return age < STALE_SECONDS
