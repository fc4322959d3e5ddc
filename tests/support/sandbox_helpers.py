"""Helps the sandbox's tests: whether they can run here, short limits, and processes that a sandbox left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from otb.sandbox import Limits, Result
from otb.sandbox.bubblewrap import Bubblewrap
from tests.support.waiting import PATIENCE_SECONDS, wait_for

# For programs that never end: whatever the load of the machine, they are still running when this is over.
SHORT = Limits(wall_seconds=1.0, cpu_seconds=1.0, memory_bytes=320 << 20)
# For programs that end by themselves, or at another limit: whatever the load, they get that far.
PATIENT = Limits(wall_seconds=PATIENCE_SECONDS, cpu_seconds=PATIENCE_SECONDS, memory_bytes=320 << 20)
# Part of a program: waits for SIGUSR1, which only a test can send to it (`HeldPrograms`).
HERE_IT_WAITS = """
import signal, time
released = []
signal.signal(signal.SIGUSR1, lambda *_: released.append(True))
while not released: time.sleep(0.01)
"""
REPOSITORY = Path(__file__).parents[2]

# In CI a missing bubblewrap is a failure, never a skip.
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None and "CI" not in os.environ, reason="bubblewrap is not installed"
)

# Reads a program and its limits a line (JSON), answers with status and output.
DRIVER = """
import json, os, sys
from otb.sandbox import Limits, Result
from otb.sandbox.bubblewrap import Bubblewrap
with Bubblewrap(workers=2) as sandbox:
    print(json.dumps(os.getuid()), flush=True)
    for line in sys.stdin:
        program, limits = json.loads(line)
        result = sandbox.run(program, Limits(**limits))
        print(json.dumps([result.status, result.stdout]), flush=True)
"""


def limits_for(statuses: str) -> Limits:
    """Returns the limits for a program that may end with these statuses (separated by spaces)."""
    return SHORT if "timeout" in statuses.split() else PATIENT


def children(pid: int) -> list[int]:
    """Returns the live child processes of this process."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Returns the live descendants of this process, the nearest first."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found[1:]


def programs(sandbox: Bubblewrap) -> list[int]:
    """Returns the programs that a sandbox runs now: children of broker, bubblewrap, its process 1 and the runner."""
    level = [sandbox.open()._process.pid]
    for _ in range(4):
        level = [child for parent in level for child in children(parent)]
    return level


class HeldPrograms:
    """Runs programs in a separate thread; they wait at HERE_IT_WAITS until they are released."""

    def __init__(self, sandbox: Bubblewrap, codes: list[str]):
        self.sandbox, self.codes, self.results = sandbox, codes, None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.results = self.sandbox.run_many(self.codes)

    def held(self) -> list[int]:
        """Returns the programs that wait now."""
        return [pid for pid in programs(self.sandbox) if listens(pid, signal.SIGUSR1)]

    def release(self) -> list[int]:
        """Releases the programs that wait now, and returns them."""
        released = self.held()
        for pid in released:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return released

    def end(self) -> list[Result]:
        """Releases all programs, including those that have not started yet, and waits for their end."""
        wait_for(lambda: self.release() is None or not self.thread.is_alive())
        self.thread.join()
        return self.results


def listens(pid: int, number: int) -> bool:
    """Tells whether a process has a handler for this signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def open_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class OrdinaryUser:
    """Opens a sandbox as an ordinary user. Root starts it and shows this user the Python in a mount namespace."""

    UID = 4321

    def __init__(self):
        libraries = sysconfig.get_path("purelib")
        sources = {"python": sys.base_prefix, "repository": REPOSITORY, "packages": libraries}
        mounts = "mount --make-rprivate / && mount -t tmpfs none /mnt"
        for name, source in sources.items():
            mounts += f" && mkdir /mnt/{name} && mount --bind {source} /mnt/{name}"
        uid = f"setpriv --reuid {self.UID} --regid {self.UID} --clear-groups"
        python = f"/mnt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        environment = {
            "PYTHONPATH": "/mnt/repository:/mnt/packages",
            "LD_LIBRARY_PATH": "/mnt/python/lib",
            "PATH": os.environ["PATH"],
        }
        words = ["unshare", "--mount", "sh", "-c", f'{mounts} && cd /mnt && exec {uid} {python} -B -c "$0"', DRIVER]
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.uid = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, "the ordinary user's sandbox did not start"
        return json.loads(line)

    def run(self, program: str, limits: Limits) -> tuple[str, str]:
        self.process.stdin.write(json.dumps([program, asdict(limits)]) + "\n")
        self.process.stdin.flush()
        return tuple(self._answer())

    def close(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE_SECONDS)
        self.process.stdout.close()
