"""Runs model-written Python as hostile code and reports how it ended.

The tool environment calls `Sandbox.run_many` once per turn; `run_python` runs a single program. conf/sandbox/*.yaml
chooses the backend: `bubblewrap` (the default), `http` (a SandboxFusion server) or `unsafe_subprocess` (no isolation).

bubblewrap protects:
- Files: a program sees Python, the allowed packages and a private /tmp that vanishes with it; nothing of the host.
- Network, other processes, environment variables, devices other than /dev/null and similar: a program sees none.
- System calls: an allow list; starting programs, sockets, namespaces, ptrace and more fail with EPERM.
- Time, memory, processes, files and output: limits of a call, for all its processes together.
- Leftovers: none. A call ends with everything that it started, and the sandbox ends with the trainer.

Not protected:
- Exploits of the kernel, which all processes share. Only a virtual machine protects against them.
- Side channels and contention: caches, timing, the load of the machine.
- A program's own result: it can fake its own exit code and output, but never those of another call.
- Knowledge of the machine: kernel version, cores, memory size, clock.
- With `unsafe_subprocess`, anything; with `http`, what happens on the server.

docs/sandbox.md describes how each protection works and is tested. This package imports no torch.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Status = Literal["ok", "user_error", "timeout", "memory", "output_limit", "sandbox_failure"]

CODE_BYTES = 1 << 20  # longer programs are not run; responses of a policy are far shorter
TRUNCATED = "\n... [output truncated]"


@dataclass(frozen=True)
class Limits:
    """The limits of one call, for all its processes together (docs/sandbox.md says which are polled).

    Args:
        wall_seconds: Time from the program's first instruction to its end.
        cpu_seconds: CPU time.
        memory_bytes: Memory.
        processes: Processes and threads, including the first.
        file_bytes: Size of all files together; they are in memory and vanish with the call.
        output_characters: Characters of stdout, and the same number for stderr.

    Raises:
        ValueError: A limit is not positive.
    """

    wall_seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    file_bytes: int = 8 << 20
    output_characters: int = 4000

    def __post_init__(self):
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r} would let no program run; limits must be positive. "
                    f"The default is {field.default}."
                )


@dataclass(frozen=True)
class Result:
    """How one program ended, and its output.

    Args:
        status: ok; user_error (exception, exit code, crash); timeout (wall or CPU); memory; output_limit; or
            sandbox_failure (not the program's fault). A program can fake its own status.
        stdout: its standard output, at most `output_characters` and the marker.
        error: its standard error (the traceback), or the limit that it exceeded.
        seconds: wall seconds of the program alone, without starting the sandbox.
    """

    status: Status
    stdout: str
    error: str
    seconds: float

    @property
    def text(self) -> str:
        """The text that the policy reads: the output, then the error."""
        return "\n".join(part for part in (self.stdout.rstrip("\n"), self.error.rstrip("\n")) if part)


class SandboxFailure(RuntimeError):
    """The sandbox itself failed twice; the run should stop rather than train on wrong tool results."""


class Sandbox(ABC):
    """Runs programs under limits, `workers` at a time. Thread-safe; lives as long as the run.

    Args:
        limits: Default limits of a call.
        workers: Programs that run at the same time; None = one per core of this process.
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None):
        self.limits = limits or Limits()
        self.workers = workers or len(os.sched_getaffinity(0))

    @abstractmethod
    def _attempt(self, codes: Sequence[str], limits: Limits) -> list[Result]:
        """Runs programs in parallel and returns a result for each; sandbox_failure is a status here, not an error."""

    @abstractmethod
    def check(self) -> None:
        """Raises SandboxFailure, with a fix, if this backend cannot keep its promises on this machine."""

    def close(self) -> None:  # noqa: B027 -- a backend that holds nothing has nothing to close
        """Ends everything that the sandbox started. Safe to call twice."""

    def run_many(self, codes: Sequence[str], limits: Limits | None = None) -> list[Result]:
        """Runs programs and returns their results in order; after a sandbox failure, a program is tried once more.

        Raises:
            SandboxFailure: The sandbox failed twice on one program.
        """
        limits = limits or self.limits
        results = {i: refusal for i, code in enumerate(codes) if (refusal := _refused(code)) is not None}
        for attempt in (1, 2):
            todo = [i for i in range(len(codes)) if i not in results]
            if not todo:
                break
            for i, result in zip(todo, self._attempt([codes[i] for i in todo], limits), strict=True):
                if result.status != "sandbox_failure":
                    results[i] = result
                elif attempt == 2:
                    raise SandboxFailure(f"{type(self).__name__} failed twice on one program: {result.error}")
        return [results[i] for i in range(len(codes))]

    def run(self, code: str, limits: Limits | None = None) -> Result:
        """Runs one program; see `run_many`."""
        return self.run_many([code], limits)[0]

    def __enter__(self):
        try:
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception):
        self.close()


def _refused(code: str) -> Result | None:
    """Returns the result of a program that is too long to run; None for any other program."""
    length = len(code.encode("utf-8", "surrogatepass"))
    if length <= CODE_BYTES:
        return None
    return Result("user_error", "", f"The program has {length} bytes; at most {CODE_BYTES} are run.", 0.0)


@functools.cache
def _default() -> Sandbox:
    import atexit

    from otb.sandbox.bubblewrap import Bubblewrap

    sandbox = Bubblewrap()
    atexit.register(sandbox.close)
    sandbox.check()
    return sandbox


def run_python(code: str, limits: Limits | None = None) -> Result:
    """Runs one program in a bubblewrap sandbox that this process keeps open. Raises SandboxFailure."""
    return _default().run(code, limits)


def clean(text: str, limit: int) -> str:
    """Returns at most `limit` characters and the marker, without control characters except tabs and line ends."""
    text = text.replace("\r\n", "\n")
    cut = text if len(text) <= limit else text[:limit] + TRUNCATED
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)


def neutralise(text: str, special_tokens: Sequence[str]) -> str:
    """Splits every special token in the text with a zero-width space, so it is tokenized as plain text."""
    for token in sorted(filter(None, special_tokens), key=len, reverse=True):
        text = text.replace(token, f"{token[0]}\N{ZERO WIDTH SPACE}{token[1:]}")
    return text
