"""Shows the state of each run of a sweep: python -m slurm.status runs/SWEEP [--watch] [--failed] [--resubmit].

`python -m slurm.status runs` lists the sweeps in a folder of runs.

Reads run directories first and SLURM second: it works without accounting, and for sweeps of hydra/launcher=local too.
Exit code: 0 while nothing has failed; CRASHED where a run failed, was killed or interrupted, is stale or missing;
REFUSED for a folder without a sweep (otb/errors.py).
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
from rich.table import Table
from rich.text import Text

from experiments.sweeps.jobs import Job, load_jobs
from experiments.sweeps.state import RunState, counts, state_table
from otb.errors import CRASHED, REFUSED, STOPPED_FROM_KEYBOARD, RunError
from slurm.states import certain_states, log_files, states_of

LOG_LINES = 20
TO_RESUBMIT = ("failed", "killed", "interrupted", "missing", "stale")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m slurm.status", description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="of a sweep, as its command printed it; or of all runs: lists the sweeps"
    )
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="refresh; 5 s by default")
    parser.add_argument("--failed", action="store_true", help="show the ends of the logs of failed runs")
    parser.add_argument("--resubmit", action="store_true", help="submit what did not end well again")
    options = parser.parse_args()
    try:
        if sweeps := sweeps_in(options.folder):
            console().print(sweeps_table(sweeps))
            return 0
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


def sweeps_in(folder: Path) -> list[Path]:
    """Returns the folders of sweeps in a folder of runs, the newest first; none where the folder is a sweep itself."""
    if any(folder.glob("job-*.json")):
        return []
    sweeps = {file.parent for file in folder.glob("*/job-*.json")}
    return sorted(sweeps, key=lambda sweep: sweep.stat().st_mtime, reverse=True)


def sweeps_table(sweeps: list[Path]) -> Group:
    """Returns a table with a row per sweep, and the command that shows one of them."""
    table = Table("sweep", "runs", "states")
    for sweep in sweeps:
        jobs = load_jobs(sweep)
        states, note = states_of(sweep.absolute(), jobs)
        table.add_row(str(sweep), str(len(jobs)), "  ".join(filter(None, [counts(states), note])))
    return Group(table, Text(f"One of them: python -m slurm.status {sweeps[0]}"))


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
