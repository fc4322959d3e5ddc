"""Waits for events. They usually come within milliseconds, but on a loaded machine within minutes."""

import time
from collections.abc import Callable
from pathlib import Path

# The generous end of every wait. Nothing in the suite is expected to take so long: whoever reaches it waits in vain.
PATIENCE_SECONDS = 900.0


def wait_for(condition: Callable[[], object], process=None, every: float = 0.02) -> None:
    """Returns when `condition()` is true. Raises AssertionError after PATIENCE_SECONDS.

    process: of multiprocessing or subprocess; once it has ended, nothing more can happen, and the wait is over at
    once. every: seconds between two checks.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        ended = has_ended(process)
        if condition():  # it may have come true just before the end
            return
        assert not ended, f"the process ended with exit code {ended_with(process)} before what was waited for"
        assert time.monotonic() < deadline, f"waited in vain for {PATIENCE_SECONDS:g} s"
        time.sleep(every)


def has_ended(process) -> bool:
    return process is not None and ended_with(process) is not None


def ended_with(process) -> int | None:
    """Returns the exit code, or None while the process runs."""
    return process.poll() if hasattr(process, "poll") else process.exitcode


def alive(pid: int) -> bool:
    """Tells whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
