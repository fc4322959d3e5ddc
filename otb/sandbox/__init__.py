"""Runs model-written Python as hostile code and tells the ways in which it can end apart.

The tool environment calls `Sandbox.run_many` once per turn; `run_python` is the same for a single program. Which
backend runs the code is `conf/sandbox/*.yaml`: `bubblewrap` (the default), `http` (a SandboxFusion server) or
`unsafe_subprocess` (no isolation). docs/sandbox.md says what is contained, how, and what is not. Imports no torch.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Status = Literal["ok", "user_error", "timeout", "memory", "output_limit", "sandbox_failure"]

CODE_BYTES = 1 << 20  # longer programs are refused unrun; a policy's response is far shorter
TRUNCATED = "\n... [output truncated]"


@dataclass(frozen=True)
class Limits:
    """What one call may use, all its processes together (docs/sandbox.md says which limits are polled).

    Args:
        wall_seconds: from the program's first instruction to its end.
        cpu_seconds: CPU time.
        memory_bytes: memory.
        processes: processes and threads, the first one included.
        file_bytes: all files together; they live in memory and vanish with the call.
        output_characters: of stdout, and again of stderr.

    Raises:
        ValueError: a limit is not positive.
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
    """How one program ended.

    Args:
        status: ok; user_error (exception, exit code, crash); timeout (wall or CPU); memory; output_limit; or
            sandbox_failure (not the program's fault). It is a claim about the program itself: code can fake its own.
        stdout: what it printed, at most `output_characters` and the marker.
        error: what it wrote to stderr (its traceback), or which limit it hit.
        seconds: wall seconds of the program alone, without the sandbox's own start-up.
    """

    status: Status
    stdout: str
    error: str
    seconds: float

    @property
    def text(self) -> str:
        """What the policy reads: the output, then the error."""
        return "\n".join(part for part in (self.stdout.rstrip("\n"), self.error.rstrip("\n")) if part)


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, twice; the run should stop instead of training on wrong tool results."""


class Sandbox(ABC):
    """Runs programs under limits, `workers` of them side by side. Thread-safe; lives as long as the run.

    Args:
        limits: for calls that bring none of their own.
        workers: programs that run at the same time; None = one per core of this process.
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None):
        self.limits = limits or Limits()
        self.workers = workers or len(os.sched_getaffinity(0))

    @abstractmethod
    def _attempt(self, codes: Sequence[str], limits: Limits) -> list[Result]:
        """One result per program, side by side; sandbox_failure is a status here, never an exception."""

    @abstractmethod
    def check(self) -> None:
        """Raises SandboxFailure with the value, the rule and the fix where this backend cannot keep its promises."""

    def close(self) -> None:  # noqa: B027 -- a backend that holds nothing has nothing to close
        """Ends everything that the sandbox started. Safe to call twice."""

    def run_many(self, codes: Sequence[str], limits: Limits | None = None) -> list[Result]:
        """One result per program, in their order; those that the sandbox failed are tried once more.

        Raises:
            SandboxFailure: a program failed twice for reasons that are not its own.
        """
        limits = limits or self.limits
        results = [_refused(code) for code in codes]
        for attempt in (1, 2):
            todo = [i for i, result in enumerate(results) if result is None or result.status == "sandbox_failure"]
            if not todo:
                break
            for i, result in zip(todo, self._attempt([codes[i] for i in todo], limits), strict=True):
                results[i] = result
                if result.status == "sandbox_failure" and attempt == 2:
                    raise SandboxFailure(f"{type(self).__name__} failed twice on one program: {result.error}")
        return results

    def run(self, code: str, limits: Limits | None = None) -> Result:
        """`run_many` for one program."""
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
    """At most `limit` characters and the marker, without control characters; tabs and line ends stay."""
    text = text.replace("\r\n", "\n")
    cut = text if len(text) <= limit else text[:limit] + TRUNCATED
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in cut)


def neutralise(text: str, special_tokens: Sequence[str]) -> str:
    """Splits every special token that stands in the text by a zero-width space: it is tokenized as plain text."""
    for token in sorted(filter(None, special_tokens), key=len, reverse=True):
        text = text.replace(token, f"{token[0]}\N{ZERO WIDTH SPACE}{token[1:]}")
    return text
