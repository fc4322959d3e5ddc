"""Runs Math-Verify for grading.py in child processes that the kernel kills if a comparison takes too long.

Math-Verify bounds its work with signal.alarm and a Python handler, which needs the main thread, takes the trainer's
own alarm, and cannot interrupt a big-integer power. Here the comparison runs in a child whose CPU timer has the default
action (the process ends), so the bound holds in any thread, inside C code, and even if the parent dies. This file is
also the child's program; it imports neither otb nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

CPU_SECONDS = 2.0  # per comparison; the slowest of 1,500 pairs of MATH answers took 0.3 s
WALL_SECONDS = 60.0  # for a child that waits; on a busy machine, 2 s of CPU time can take ten times as long
MEMORY_BYTES = 4 << 30
JOBS_PER_PROCESS = 5_000  # sympy's caches grow; a fresh process costs half a second
MAX_PROCESSES = min(4, os.cpu_count() or 1)


class GraderProcess:
    """One child process that compares answers for one thread at a time. Raises RuntimeError if it cannot start."""

    def __init__(self) -> None:
        self.jobs = 0
        self.child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONHASHSEED": "0"},  # sympy's order of terms must not differ from run to run
        )
        assert self.child.stdin is not None and self.child.stdout is not None, "both are pipes"
        self.questions, self.answers = self.child.stdin, self.child.stdout
        if self.answers.readline() != "ready\n":
            self.close()
            raise RuntimeError(
                f"The grader process ended with code {self.child.returncode} before its first answer; it needs "
                f"math-verify in {sys.executable}. Its own message is above. Try `pip install math-verify`."
            )

    def compare(self, answer: str, reference: str) -> tuple[str, str]:
        """Compares two LaTeX answers. Returns (verdict, detail).

        verdict: correct, wrong, unparsable, timeout or error.
        """
        self.jobs += 1
        try:
            self.questions.write(json.dumps([answer, reference]) + "\n")
            self.questions.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if line:
            verdict, detail = json.loads(line)
            return verdict, detail
        code = self.child.wait()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return "timeout", f"no verdict within {CPU_SECONDS:g} s of CPU time or {WALL_SECONDS:g} s"
        return "error", f"the grader process ended with code {code}"

    @property
    def usable(self) -> bool:
        """Whether the child is alive and has made fewer comparisons than JOBS_PER_PROCESS."""
        return self.child.poll() is None and self.jobs < JOBS_PER_PROCESS

    def close(self) -> None:
        """Ends the child and waits for it; an idle child ends when its input closes."""
        with contextlib.suppress(BrokenPipeError):
            self.questions.close()
        try:
            self.child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.answers.close()


class GraderPool:
    """A thread-safe pool of at most `size` grader processes, started when first needed. A fork gets its own pool."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Empties the pool without touching its processes, which after a fork belong to the parent."""
        self.idle: list[GraderProcess] = []
        self.slots = threading.BoundedSemaphore(self.size)

    def compare(self, answer: str, reference: str) -> tuple[str, str]:
        """Compares two LaTeX answers like `GraderProcess.compare`, in any free process."""
        with self.slots:
            process = self.idle.pop() if self.idle else GraderProcess()
            if not process.usable:
                process.close()
                process = GraderProcess()
            try:
                verdict = process.compare(answer, reference)
            except BaseException:  # interrupted before its answer was read, it would answer the next question wrongly
                process.child.kill()
                process.close()
                raise
            if process.usable:
                self.idle.append(process)
            else:
                process.close()
            return verdict

    def close(self) -> None:
        """Ends the idle processes."""
        while self.idle:
            self.idle.pop().close()


def verdict_on(answer: str, reference: str) -> tuple[str, str]:
    """Returns Math-Verify's verdict on two LaTeX answers, in this process and without a time limit."""
    from math_verify import verify

    expected, read = expressions(reference), expressions(answer)
    if not expected:
        return "error", f"the reference {reference!r} is not an expression that math-verify can read"
    if not read:
        return "unparsable", ""
    equal = verify(expected, read, timeout_seconds=None, raise_on_error=True)
    return ("correct" if equal else "wrong"), ""


def expressions(answer: str) -> list:
    """Returns the sympy expressions that Math-Verify reads in an answer; an empty list if it reads none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    usual = LatexExtractionConfig()
    # Math-Verify mistakes a final ` t` or ` b + c` for a unit and drops it; without that rule it can read `\sin t`.
    unitless = replace(usual, normalization_config=replace(usual.normalization_config, units=False))
    # The form with dollars reads percent signs; the box is for answers that contain dollars.
    for form, config in (("$%s$", usual), ("\\boxed{%s}", usual), ("$%s$", unitless)):
        parsed = parse(form % answer, [config, ExprExtractionConfig()], parsing_timeout=None)
        if read := [item for item in parsed if not isinstance(item, str)]:
            return read
    return []


def main() -> None:
    """Reads [answer, reference] lines and writes [verdict, detail] lines, until the input closes."""
    import logging
    import resource

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # meant for the trainer (SLURM signals every process of a step)
    for signum in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's output must not mix with the verdicts
    logging.disable()
    import math_verify  # noqa: F401  no comparison should pay for the import

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            verdict = verdict_on(*json.loads(line))
        except Exception as error:
            verdict = "error", f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main()
