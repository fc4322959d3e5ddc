"""A cluster's warning that it will soon take a job away: noted when it comes, obeyed at the next safe boundary.

SLURM sends SIGUSR2 before the time limit (sbatch --signal) and SIGTERM before it preempts. experiments/run.py listens,
RunTrainer asks where it could write a checkpoint. Imports no torch.
"""

from __future__ import annotations

import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
EXIT_CODE = 75  # EX_TEMPFAIL: start the same command again, and it goes on
_received = threading.Event()


class Interrupted(BaseException):
    """The run ends at a checkpoint because of a warning. No Exception: nothing that retries or reports may take it."""


def listen() -> None:
    """From now on a warning is noted instead of ending the process. In the main thread only, as Python demands."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, lambda *_: _received.set())


def received() -> bool:
    return _received.is_set()
