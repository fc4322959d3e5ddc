"""A cluster's warning that it will soon take a job away is noted when it comes and obeyed at the next safe boundary.

SLURM sends SIGUSR2 before the time limit (sbatch --signal) and SIGTERM before it preempts. experiments/run.py listens,
RunTrainer asks where it could write a checkpoint. Imports no torch.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
WARNING_VARIABLE = "OTB_WARNING_SECONDS"  # what a SLURM job tells its run: from the warning to the time limit
_received = threading.Event()


class Interrupted(BaseException):
    """Ends the run at a checkpoint because of a warning. No Exception, so that nothing that retries catches it."""


def listen(pass_on: bool = False) -> None:
    """Notes warnings from now on instead of letting them end the process. Does nothing outside of the main thread.

    pass_on: to the processes of the run, which this one has started or is about to start.
    """
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _note_and_pass_on if pass_on else _note)


def passes_on() -> bool:
    """Tells whether this process listens for others that it has started."""
    return signal.getsignal(signal.SIGTERM) is _note_and_pass_on


def _note(number: int, frame: FrameType | None) -> None:
    _received.set()


def _note_and_pass_on(number: int, frame: FrameType | None) -> None:
    _received.set()
    children = psutil.Process().children()
    if not children:
        raise Interrupted("a warning signal came before the processes of the run were started")
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def received() -> bool:
    """Tells whether a warning has come."""
    return _received.is_set()
