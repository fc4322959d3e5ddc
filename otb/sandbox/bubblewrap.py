"""The default backend: bubblewrap around a preloaded process that forks a child in fresh namespaces for each call.

Three processes share the work. This module, in the trainer, sends programs and waits. `broker.py` is a small separate
process that starts bubblewrap and enforces the limits of every call. `runner.py` runs inside bubblewrap, imports the
packages once and forks a child per call. docs/sandbox.md describes the details.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from otb.sandbox import Limits, Result, Sandbox, SandboxFailure, clean
from otb.sandbox.runtime import advice, setup

# A long wall limit, because a busy machine must not look like a broken sandbox.
PROBE_LIMITS = Limits(wall_seconds=60.0, memory_bytes=256 << 20, processes=8, file_bytes=1 << 20)
# Probes that must pass before the first program runs: (what is probed, program, required status).
PROBES = (
    ("plain Python", "print(1 + 1)", "ok"),
    (
        "the limit of processes",
        "import os, time\nfor n in range(PROCESSES):\n    if os.fork() == 0: time.sleep(60)",
        "user_error",
    ),
    ("the memory limit of one process", "block = b'x' * MEMORY", "memory"),
    (
        "the memory limit of processes together",
        "import os, time\nfor n in range(2): os.fork()\nblock = b'x' * (MEMORY // 3)\ntime.sleep(60)",
        "memory",
    ),
    (
        "the limit of files",
        "open('a', 'wb').write(b'x' * (FILES - 1)); open('b', 'wb').write(b'x' * FILES)",
        "user_error",
    ),
    ("no network", "import socket\nsocket.socket()", "user_error"),
    ("no namespaces", "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "user_error"),
)


class Bubblewrap(Sandbox):
    """A bubblewrap sandbox that runs each program in a fresh process with fresh namespaces.

    Args:
        limits: Default limits of a call.
        workers: Programs that run at the same time; None = one per core of this process.
        packages: Packages that a program may import besides the standard library. They are imported once, in advance.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        workers: int | None = None,
        packages: Sequence[str] = ("numpy", "mpmath", "sympy"),
    ):
        super().__init__(limits, workers)
        self.packages = tuple(packages)
        self._lock = threading.Lock()
        self._broker: _Broker | None = None

    def open(self) -> _Broker:
        """Returns the broker and starts it if necessary. Raises SandboxFailure, which says what to install or set."""
        with self._lock:
            if self._broker is not None and self._broker.owner != os.getpid():
                self._broker = None  # we are a fork: the sandbox belongs to our parent
            if self._broker is None or self._broker.broken:
                self.close()
                self._broker = _Broker(setup(self.packages, self.workers))
            return self._broker

    def check(self) -> None:
        self.open()
        names = {
            "PROCESSES": PROBE_LIMITS.processes,
            "MEMORY": PROBE_LIMITS.memory_bytes,
            "FILES": PROBE_LIMITS.file_bytes,
        }
        programs = []
        for _, program, _ in PROBES:
            for name, value in names.items():
                program = program.replace(name, str(value))
            programs.append(program)
        for (what, _, expected), result in zip(PROBES, self.run_many(programs, PROBE_LIMITS), strict=True):
            if result.status != expected:
                raise SandboxFailure(
                    f"The sandbox cannot be trusted here: the probe of {what} ended with {result.status!r} instead of "
                    f"{expected!r} ({result.text!r}). No program has been run. {advice()}"
                )

    def close(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None and broker.owner == os.getpid():
            broker.close()

    def _attempt(self, codes: Sequence[str], limits: Limits) -> list[Result]:
        broker = self.open()
        return [_result(future.result(), limits) for future in [broker.send(code, limits) for code in codes]]


class _Broker:
    """The trainer's end of the socket to broker.py. One thread reads; any thread may send."""

    def __init__(self, setup: dict):
        self.owner = os.getpid()
        self.broken = ""
        self._ids = itertools.count()
        self._futures: dict[int, Future] = {}
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        words = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("broker.py")),
            str(theirs.fileno()),
            str(self.owner),
        ]
        # The broker gets only the variable that this Python needs to find its libraries.
        environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        self._process = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._ready: Future = Future()
        self._reader = threading.Thread(target=self._read, name="sandbox", daemon=True)
        self._reader.start()
        self._write(setup)
        broken = self._ready.result()
        if broken:
            self.close()
            raise SandboxFailure(f"The sandbox does not start: {broken}\n{advice()}")

    def send(self, code: str, limits: Limits) -> Future:
        """Sends one program. Returns the future of the broker's answer, a dict."""
        future: Future = Future()
        call = next(self._ids)
        with self._lock:
            if self.broken:
                future.set_result({"status": "sandbox_failure", "note": self.broken})
                return future
            self._futures[call] = future
        self._write({"id": call, "code": code, "limits": asdict(limits)})
        return future

    def close(self) -> None:
        """Ends the broker and everything in the sandbox."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._reader.join()
        self._socket.close()

    def _write(self, message: dict) -> None:
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._socket.sendall(struct.pack("!I", len(data)) + data)
        except OSError:
            pass  # the reader notices it too, and answers the waiting calls

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream:
            while len(head := stream.read(4)) == 4:
                message = json.loads(stream.read(struct.unpack("!I", head)[0]))
                if "broken" in message:
                    self.broken = message["broken"]
                elif "ready" in message:
                    if not self._ready.done():
                        self._ready.set_result("")
                else:
                    self._futures.pop(message["id"]).set_result(message)
        with self._lock:
            self.broken = self.broken or f"the sandbox's broker (process {self._process.pid}) has ended"
            left, self._futures = self._futures, {}
        if not self._ready.done():
            self._ready.set_result(self.broken)
        for future in left.values():
            future.set_result({"status": "sandbox_failure", "note": self.broken})


def _result(message: dict, limits: Limits) -> Result:
    """Turns the broker's answer into a Result."""
    status = message["status"]
    note = {
        "timeout": f"TimeoutError: stopped at {limits.wall_seconds:g} s, or {limits.cpu_seconds:g} s of CPU time.",
        "memory": f"MemoryError: more than {limits.memory_bytes >> 20} MiB.",
        "output_limit": f"stopped: more than {limits.output_characters} characters of output.",
    }.get(status, message.get("note", ""))
    out, err = (clean(message.get(name, ""), limits.output_characters) for name in ("out", "err"))
    return Result(status, out, "\n".join(filter(None, (err.rstrip("\n"), note))), message.get("seconds", 0.0))
