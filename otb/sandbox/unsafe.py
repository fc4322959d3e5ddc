"""Runs each program in a plain subprocess without isolation, for machines that are themselves disposable.

A program can read, change and send whatever the trainer's user can. Time, memory per process and output are still
limited, so an honest mistake does not stop a run; a hostile program can evade all limits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from otb.sandbox import Limits, Result, Sandbox, Status, clean
from otb.sandbox.runner import MEMORY_EXIT

# Arguments: this folder, CPU seconds, memory bytes, file bytes. The program comes in on stdin.
BOOT = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import runner
del sys.path[0]
source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
for kind, limit in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), map(int, sys.argv[2:])):
    resource.setrlimit(kind, (limit, limit))
sys.argv[:] = [""]
sys.exit(runner.run(source))
"""


class UnsafeSubprocess(Sandbox):
    """A sandbox in name only: programs run in plain subprocesses of the trainer's user, and nothing isolates them."""

    def check(self) -> None:
        warnings.warn(
            "sandbox=unsafe_subprocess: model-written code runs WITHOUT ISOLATION, with this user's files, network and "
            "credentials. Use it only on disposable machines; sandbox=bubblewrap isolates.",
            stacklevel=2,
        )

    def _attempt(self, codes: Sequence[str], limits: Limits) -> list[Result]:
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda code: _run(code, limits), codes))


def _run(code: str, limits: Limits) -> Result:
    """Runs one program under the limits that apply to a plain subprocess."""
    words = [sys.executable, "-I", "-u", "-c", BOOT, str(Path(__file__).parent)]
    words += [str(int(limits.cpu_seconds) + 1), str(limits.memory_bytes), str(limits.file_bytes)]
    timed_out = False
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=folder, env={}, start_new_session=True
            )
        except OSError as failure:
            return Result("sandbox_failure", "", str(failure), 0.0)
        try:
            process.communicate(code.encode("utf-8", "surrogatepass"), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        seconds = time.monotonic() - started
        texts = [_start(file, limits.output_characters) for file in (out, err)]
    status: Status = "user_error"
    if timed_out or (process.returncode == -signal.SIGKILL):
        status = "timeout"
    elif any(len(text) > limits.output_characters for text in texts):
        status = "output_limit"
    elif process.returncode in (0, MEMORY_EXIT):
        status = "ok" if process.returncode == 0 else "memory"
    stdout, error = (clean(text, limits.output_characters) for text in texts)
    if status != "ok" and not error:
        error = f"{status} (exit code {process.returncode})"
    return Result(status, stdout, error, seconds)


def _start(file, characters: int) -> str:
    """Returns the file's first `characters` characters, and one more if it is longer."""
    file.seek(0)
    return file.read(4 * characters + 4).decode("utf-8", "replace")[: characters + 1]
