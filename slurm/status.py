"""Shows the states of a sweep's runs: python -m slurm.status runs/SWEEP [--watch] [--failed] [--resubmit].

Reads run directories first and SLURM second: it works without accounting, and also for hydra/launcher=local.
Exit code: 0 while nothing has failed, CRASHED if a run has failed, is stale or missing, REFUSED for a folder without a
sweep (otb/errors.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from pathlib import Path

from filelock import FileLock
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from experiments.sweeps.jobs import Job, load_jobs
from experiments.sweeps.state import RunState, counts, state_table
from otb.errors import CRASHED, REFUSED, STOPPED_FROM_KEYBOARD, RunError
from slurm.states import certain_states, log_files, states_of

LOG_LINES = 20
TO_RESUBMIT = ("failed", "missing", "stale")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m slurm.status", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the sweep's folder, as its launcher printed it")
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="refresh; 5 s by default")
    parser.add_argument("--failed", action="store_true", help="show the ends of the logs of failed runs")
    parser.add_argument("--resubmit", action="store_true", help="submit failed, missing and stale runs again")
    options = parser.parse_args()
    try:
        if options.resubmit:
            resubmit(options.folder.absolute())
        if options.watch:
            return watch(options.folder.absolute(), options.watch)
        jobs = load_jobs(options.folder)
        states, note = states_of(options.folder.absolute(), jobs)
        console().print(table(states, note))
        if options.failed:
            print_logs(options.folder, jobs, states)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return STOPPED_FROM_KEYBOARD
    return exit_code(states)


def exit_code(states: list[RunState]) -> int:
    """Returns 0 while nothing has failed, else CRASHED."""
    return CRASHED if any(state.state in TO_RESUBMIT for state in states) else 0


def table(states: list[RunState], note: str) -> Group:
    """Returns the table of the runs with a line below it for the counts and the note."""
    return Group(state_table(states), Text("  ".join(filter(None, [counts(states), note]))))


def console() -> Console:
    """Returns a console as wide as the terminal; for a file or pipe, one wide enough for the names of runs."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=160)


def watch(folder: Path, seconds: float) -> int:
    """Shows the table until nothing is queued or running. Returns the exit code."""
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            states, note = states_of(folder, load_jobs(folder))
            live.update(table(states, note), refresh=True)
            if all(state.over for state in states):
                return exit_code(states)
            time.sleep(seconds)


def print_logs(folder: Path, jobs: list[Job], states: list[RunState]) -> None:
    """Prints the last lines of every log of the failed, stale and missing runs."""
    for job, state in zip(jobs, states, strict=True):
        if state.state not in TO_RESUBMIT:
            continue
        print(f"\n==== {job.number}: {state.run}: {state.state}: {state.error}")
        for log in log_files(folder, job):
            print(f"---- {log}")
            with open(log, encoding="utf8", errors="replace") as lines:
                print("".join(deque(lines, LOG_LINES)), end="")


def resubmit(folder: Path) -> None:
    """Submits failed runs again, with the same code and options. Raises RunError."""
    from slurm.submit import resend

    load_jobs(folder)  # raises for a folder without a sweep, before it gets a lock
    with FileLock(folder / ".submitting.lock"):
        jobs = load_jobs(folder)
        states = certain_states(folder, jobs)
        failed = [job for job, state in zip(jobs, states, strict=True) if state.state in TO_RESUBMIT and state.over]
        to_send = [job for job in failed if job.submission]
        for job in failed:
            if not job.submission:
                why = job.error or "its sweep ran on one machine"
                print(f"{job.number}: never submitted: {why}. Run the sweep's own command again.", file=sys.stderr)
        sent = f"{len(to_send)} runs submitted as job {', '.join(resend(folder, to_send))}" if to_send else ""
        print(sent or "nothing to submit")


if __name__ == "__main__":
    sys.exit(main())
