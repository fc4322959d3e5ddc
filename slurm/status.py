"""Where the runs of a sweep stand: python -m slurm.status runs/SWEEP [--watch] [--failed] [--resubmit].

Reads run directories first and SLURM second: it works without accounting, and for sweeps of hydra/launcher=local too.
Exit code: 0 while nothing has failed, 1 where a run failed, is stale or missing, 2 for a folder that is no sweep's.
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
from otb.errors import RunError
from slurm.look import log_files, look

LOG_LINES = 20
TO_RESUBMIT = ("failed", "missing", "stale")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m slurm.status", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the sweep, as its launcher printed it")
    parser.add_argument("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="refresh; 5 s by default")
    parser.add_argument("--failed", action="store_true", help="the ends of the logs of runs that failed")
    parser.add_argument("--resubmit", action="store_true", help="send what failed, is missing or stale, as it was sent")
    given = parser.parse_args()
    try:
        if given.resubmit:
            resubmit(given.folder.absolute())
        if given.watch:
            return watch(given.folder.absolute(), given.watch)
        jobs = load_jobs(given.folder)
        states, note = look(given.folder.absolute(), jobs)
        console().print(table(states, note))
        if given.failed:
            show_logs(given.folder, jobs, states)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return int(any(state.state in TO_RESUBMIT for state in states))


def table(states: list[RunState], note: str) -> Group:
    return Group(state_table(states), Text("  ".join(filter(None, [counts(states), note]))))


def console() -> Console:
    """As wide as the terminal; a file or pipe is wide enough for the names of runs."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def watch(folder: Path, seconds: float) -> int:
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            states, note = look(folder, load_jobs(folder))
            live.update(table(states, note), refresh=True)
            if all(state.over for state in states):
                return int(any(state.state in TO_RESUBMIT for state in states))
            time.sleep(seconds)


def show_logs(folder: Path, jobs: list[Job], states: list[RunState]) -> None:
    for job, state in zip(jobs, states, strict=True):
        if state.state not in TO_RESUBMIT:
            continue
        print(f"\n==== {job.number}: {state.run}: {state.state}: {state.error}")
        for log in log_files(folder, job):
            print(f"---- {log}")
            with open(log, encoding="utf8", errors="replace") as lines:
                print("".join(deque(lines, LOG_LINES)), end="")


def resubmit(folder: Path) -> None:
    """What failed, with the code and the options that it was sent with. Raises RunError."""
    from slurm.submit import answered, resend

    load_jobs(folder)  # a folder that holds no sweep gets no lock
    with FileLock(folder / ".submitting.lock"):
        jobs = load_jobs(folder)
        states = answered(*look(folder, jobs))
        failed = [job for job, state in zip(jobs, states, strict=True) if state.state in TO_RESUBMIT and state.over]
        wanted = [job for job in failed if job.submission]
        for job in failed:
            if not job.submission:
                why = job.error or "its sweep ran on one machine"
                print(f"{job.number}: never sent to SLURM: {why}. Give the sweep's own command again.", file=sys.stderr)
        print(f"{len(wanted)} runs sent as job {', '.join(resend(folder, wanted))}" if wanted else "nothing to send")


if __name__ == "__main__":
    sys.exit(main())
