"""A cluster's warning that it will soon take a job away is noted when it comes and obeyed at the next safe boundary.

SLURM sends SIGUSR2 before the time limit (sbatch --signal) and SIGTERM before it preempts. experiments/run.py listens,
RunTrainer asks where it could write a checkpoint. Imports no torch.
"""

from __future__ import annotations

import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
WARNING_VARIABLE = "OTB_WARNING_SECONDS"  # what a SLURM job tells its run: from the warning to the time limit
_received = threading.Event()


class Interrupted(BaseException):
    """Ends the run at a checkpoint because of a warning. No Exception, so that nothing that retries catches it."""


def listen() -> None:
    """Notes warnings from now on instead of letting them end the process. Does nothing outside of the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, lambda *_: _received.set())


def received() -> bool:
    """Tells whether a warning has come."""
    return _received.is_set()
