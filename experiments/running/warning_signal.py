"""A cluster's warning, or a first Ctrl-C, is noted when it comes and obeyed where a run can write a checkpoint.

SLURM sends SIGUSR2 before the time limit (sbatch --signal) and SIGTERM before it preempts. experiments/run.py listens,
RunTrainer asks at the end of each step. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import psutil

from otb.errors import STOPPED_FROM_KEYBOARD, TRY_AGAIN

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
WARNING_VARIABLE = "OTB_WARNING_SECONDS"  # what a SLURM job tells its run: from the warning to the time limit
STOPPING = "stopping: a checkpoint is written after this step; Ctrl-C again ends the run at once"
_received, _from_keyboard = threading.Event(), threading.Event()


class Interrupted(BaseException):
    """Ends the run at a checkpoint because of a warning. No Exception, so that nothing that retries catches it.

    Args:
        text: why, and what was written.
        code: the exit code of the process.
    """

    def __init__(self, text: str, code: int = TRY_AGAIN):
        super().__init__(text)
        self.code = code


def interruption(step: int) -> Interrupted:
    """Returns what ends a run that was warned, or stopped by Ctrl-C, once the checkpoint of `step` is written."""
    why = "stopped" if _from_keyboard.is_set() else "a warning signal came"
    code = STOPPED_FROM_KEYBOARD if _from_keyboard.is_set() else TRY_AGAIN
    return Interrupted(f"{why}; checkpoint written at step {step}", code)


@contextlib.contextmanager
def finishing_the_step(say: bool) -> Iterator[None]:
    """Lets the first Ctrl-C inside the block end the run at its next checkpoint, and a second one at once.

    say: whether this process tells the user so. Does nothing where Ctrl-C is ignored or outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _from_keyboard.set()
        _received.set()
        if say:
            with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of another one
                os.write(sys.stderr.fileno(), f"\n{STOPPING}\n".encode())

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def pass_on_ctrl_c() -> None:
    """Hands every Ctrl-C to the processes that this one is about to start: they decide when the run ends."""
    signal.signal(signal.SIGINT, _pass_on_ctrl_c)


def _pass_on_ctrl_c(number: int, frame: FrameType | None) -> None:
    if not _send_to_children(number):
        raise KeyboardInterrupt


def listen(pass_on: bool = False) -> None:
    """Notes warnings from now on instead of letting them end the process. Does nothing outside of the main thread.

    pass_on: to the processes of the run, which this one has started or is about to start.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _note_and_pass_on if pass_on else _note)


def signals_passed_on() -> set[str]:
    """Returns the names of the signals that this process passes on to the processes that it has started."""
    ours = {_note_and_pass_on, _pass_on_ctrl_c}
    return {number.name for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) in ours}


def passes_on() -> bool:
    """Tells whether this process listens for others that it has started."""
    return signal.getsignal(signal.SIGTERM) is _note_and_pass_on


def _note(number: int, frame: FrameType | None) -> None:
    _received.set()


def _note_and_pass_on(number: int, frame: FrameType | None) -> None:
    _received.set()
    if not _send_to_children(number):
        raise Interrupted("a warning signal came before the processes of the run were started")


def _send_to_children(number: int) -> bool:
    """Sends a signal to the child processes; tells whether there were any."""
    children = psutil.Process().children()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
    return bool(children)


def received() -> bool:
    """Tells whether a warning or a first Ctrl-C has come."""
    return _received.is_set()
