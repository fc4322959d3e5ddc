"""One process per run directory: a lock file with a heartbeat, which also decides on network file systems.

Taken by experiments/run.py before anything is written. Advisory locks are not used: they do not cross every network
file system, and a lock left behind by SIGKILL must not keep a run from being resumed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path

import psutil

from otb.records import RunError, write_atomically

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0  # a holder on another host is taken for dead after this silence


class RunLock:
    """`with RunLock(directory):` holds the directory or raises RunError at once, naming the process that holds it.

    A holder on this host is dead when its process is gone; one on another host when its heartbeat stopped.
    """

    def __init__(self, directory: Path):
        self.file = Path(directory) / "lock.json"
        self.token = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self._acquire()
        self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if self.held():
            self.file.unlink(missing_ok=True)

    def held(self) -> bool:
        """Whether the file on disk still names this process."""
        return read_lock(self.file).get("token") == self.token

    def _acquire(self) -> None:
        while True:
            try:
                descriptor = os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                self._remove_if_dead()
                continue
            except OSError as error:
                raise RunError(
                    f"{self.file.parent} cannot be written: {error.strerror}. Choose another runs_dir or mend its "
                    "permissions."
                ) from error
            with os.fdopen(descriptor, "w") as stream:
                stream.write(self._content())
            return

    def _remove_if_dead(self) -> None:
        holder = read_lock(self.file)
        if is_alive(holder, self.file):
            age = time.time() - holder.get("heartbeat", time.time())
            raise RunError(
                f"{self.file.parent} is in use by process {holder.get('pid')} on {holder.get('host')} (heartbeat "
                f"{age:.0f} s ago); one process may write a run. Wait for it, stop it, or use another seed or runs_dir."
            )
        aside = self.file.with_name(f".{self.file.name}.{self.token}")
        try:
            os.rename(self.file, aside)
        except FileNotFoundError:
            return  # another process was faster
        if read_lock(aside).get("token") != holder.get("token"):  # it had already replaced the dead lock by its own
            os.link(aside, self.file)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if not self.held():
                return  # somebody took this process for dead; the trainer sees it before the next step
            write_atomically(self.file, self._content())

    def _content(self) -> str:
        process = psutil.Process()
        facts = {
            "token": self.token,
            "host": socket.gethostname(),
            "pid": process.pid,
            "process_started": process.create_time(),
            "heartbeat": time.time(),
        }
        return json.dumps(facts) + "\n"


def read_lock(file: Path) -> dict:
    """The lock's facts; {} where there is none or its writer died before the first line."""
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def is_alive(holder: dict, file: Path) -> bool:
    if holder.get("host") == socket.gethostname():
        try:  # a recycled process id has another start time
            return abs(psutil.Process(holder["pid"]).create_time() - holder["process_started"]) < 1.0
        except psutil.NoSuchProcess:
            return False
    try:
        heartbeat = holder.get("heartbeat") or file.stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - heartbeat < STALE_SECONDS
