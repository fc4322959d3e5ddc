"""Keeps a process that has imported what every run imports, and does each run of a sweep in a fork of it.

Imports are a fifth of the seconds of a tiny run. Only where no GPU is visible: CUDA, once a library has looked for it,
does not survive a fork. What the libraries have begun by then does: allocators and OpenMP come with handlers of forks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from experiments.running.warning_signal import SIGNALS, Interrupted, listen
from otb.errors import TRY_AGAIN

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Preloaded:
    """Does one run at a time, and can then do the next. Looks like the subprocess.Popen of its run.

    Args:
        code: the folder of the project's code that is imported.
        environment: variables of the process and of all its runs.
    """

    def __init__(self, code: Path, environment: dict[str, str]):
        self.code, self.environment = code, environment
        self.process: subprocess.Popen | None = None
        self.returncode: int | None = None

    def start(self, overrides: list[str], environment: dict[str, str], log: Path) -> None:
        """Begins a run, which writes what it prints at the end of `log`. environment: variables of this run alone."""
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, str(self.code / "experiments" / "sweeps" / "preloaded.py")]
            with open(log, "ab") as output:  # a failing import is the first run's
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
                self.process = subprocess.Popen(command, env=self.environment, text=True, **pipes)
        self.returncode = None
        print(json.dumps([overrides, environment, str(log)]), file=self.process.stdin, flush=True)

    def poll(self) -> int | None:
        """Returns the exit code of the run, negative for a signal, or None while it runs."""
        return self._answer(0.0)

    def wait(self, timeout: float) -> int:
        """Returns the exit code of the run. Raises subprocess.TimeoutExpired after so many seconds."""
        if (code := self._answer(timeout)) is None:
            raise subprocess.TimeoutExpired(self.process.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a warning to the run, or ends the process that has none yet."""
        self.process.send_signal(number)

    def terminate(self) -> None:
        """Sends SIGTERM to the run, or to the process that has none yet."""
        self.process.terminate()

    def close(self) -> None:
        """Lets the process end after its run."""
        if self.process is not None:
            self.process.stdin.close()

    def _answer(self, timeout: float) -> int | None:
        answers = self.process.stdout
        if self.returncode is None and select.select([answers], [], [], timeout)[0]:
            line = answers.readline()
            self.returncode = int(line) if line else self.process.wait()
        return self.returncode


def serve() -> NoReturn:
    """Does the run of each line of stdin in a fork, and answers with its exit code. Raises Interrupted between runs."""
    if "SLURM_JOB_ID" in os.environ:
        listen(pass_on=True)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints when it is imported answers nothing
    import_all()
    gc.freeze()  # a collection in a fork would copy the pages of all libraries
    ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the run gets too, and ends by
    server = os.getpid()
    for line in sys.stdin:
        overrides, environment, log = json.loads(line)
        print_to(log)  # what goes wrong with a fork is told where its run would
        if (run := os.fork()) == 0:
            signal.signal(signal.SIGINT, ctrl_c)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)  # until the run itself listens
            answers.close()
            end_with(server)
            do(overrides, environment)
        stopped = signal.signal(signal.SIGTERM, lambda *_, run=run: os.kill(run, signal.SIGTERM))
        _, status = os.waitpid(run, 0)
        signal.signal(signal.SIGTERM, stopped)
        with suppress(BrokenPipeError):  # the sweep was killed; its run has gone on to its end
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    leave(0)


def import_all() -> None:
    """Imports what a run imports."""
    tiny_policy = "transformers.models.qwen3.modeling_qwen3"  # which transformers imports when it is first asked for
    for name in ("experiments.run", "experiments.running.train", "analysis.run_picture", tiny_policy):
        importlib.import_module(name)


def print_to(log: str) -> None:
    """Lets this process print to the end of a log."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(file, descriptor)
    os.close(file)


def end_with(server: int) -> None:
    """Lets the kernel end this process with the server's: a run that nobody waits for would hold its lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != server:
            os.kill(os.getpid(), signal.SIGTERM)


def reseed() -> None:
    """Gives this process random states of its own, as a new one has; Python does it for `random` alone."""
    import numpy as np
    from datasets.fingerprint import fingerprint_rng

    np.random.seed()
    fingerprint_rng.seed()  # names cached files of functions that cannot be hashed: two runs must not share one


def do(overrides: list[str], environment: dict[str, str]) -> NoReturn:
    """Does what `python experiments/run.py OVERRIDES` does, in this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    os.environ.update(environment)
    reseed()
    command = Path(__file__).resolve().parent.parent / "run.py"
    sys.argv, sys.path[0] = [str(command), *overrides], str(command.parent)
    try:
        runpy.run_path(str(command), run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # Python prints it, as it does with every other exception, and ends with 1
        leave(end.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
    """Ends this process as an exit does, but does not take the libraries apart, which costs 2 s."""
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        serve()
    except Interrupted:
        leave(TRY_AGAIN)
