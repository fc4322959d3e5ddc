"""Where the runs of a sweep stand: from their directories first, then from what the queue says. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.table import Column, Table

from experiments.running.summary import distinct_names
from experiments.sweeps.jobs import Job
from otb.records import RunDirectory, read_rows
from otb.records.lock_file import has_process, is_here, read_lock

STALE_AFTER_SECONDS = 300.0  # a run is stale after the longer of the two without a heartbeat
STALE_AFTER_STEPS = 10
TAIL_BYTES = 1 << 16
RECENT_ROWS = 20
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")  # of SLURM's job states
COLOURS = {"done": "green", "running": "cyan", "queued": "", "failed": "red", "killed": "red"}
COLOURS |= {"interrupted": "yellow", "missing": "yellow", "stale": "yellow"}
GOES_ON = "the same command resumes it"


class Queued(NamedTuple):
    """What a queue says of a job that is in it."""

    job: str  # such as 71_3
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str = ""  # why it waits


class RunState(NamedTuple):
    """Where a run stands."""

    run: Path
    state: str  # done, running, queued, failed, killed, interrupted, missing, stale
    step: int
    steps: int
    accuracy: float | None  # the last held-out one
    tokens: float
    seconds_left: float | None
    job: str  # SLURM's name of its last job
    in_queue: bool
    error: str

    @property
    def over(self) -> bool:
        """Tells whether nothing is going to happen to it any more."""
        return self.state not in ("running", "queued") and not self.in_queue


def state_of(job: Job, queued: Queued | None = None, queue: set[str] | None = None) -> RunState:
    """Returns where the run of a job stands.

    queued: what the queue says of this run; queue: the SLURM_JOB_ID of every job in it, None where it cannot be asked.
    """
    directory = RunDirectory(job.run)
    status, lock = directory.status(), read_lock(directory.lock_file)
    rows, evaluations = last_rows(directory.metrics_file), list(read_rows(directory.evaluations_file))
    seconds = sum(row["seconds_step"] for row in rows) / len(rows) if rows else 0.0
    step = rows[-1]["step"] if rows else 0
    fresh = bool(lock) and is_fresh(directory.lock_file, seconds)
    gone = has_gone(lock, queue)
    state, error = decide_state(job, status, queued, queue, locked=bool(lock), fresh=fresh, gone=gone)
    per_step = seconds + sum(row["seconds"] for row in evaluations) / max(1, step)
    return RunState(
        run=directory.path,
        state=state,
        step=step,
        steps=job.steps,
        accuracy=next((row["accuracy"] for row in reversed(evaluations) if "accuracy" in row), None),
        tokens=rows[-1].get("own_tokens_total", 0) if rows else 0,
        seconds_left=per_step * (job.steps - step) if state == "running" and rows else None,
        job=queued.job if queued else job.job or "",
        in_queue=queued is not None,
        error=error,
    )


def decide_state(
    job: Job, status: dict, queued: Queued | None, queue: set[str] | None, locked: bool, fresh: bool, gone: bool
) -> tuple[str, str]:
    """Returns the state of a run, and the reason for it or "".

    locked: there is a lock; fresh: its heartbeat is young; gone: its process is known to be no more.
    """
    waits = queued is not None and queued.state in WAITING
    if status.get("state") == "finished" and status["step"] >= job.steps and not waits:  # waits: overwrite=true
        return "done", ""
    if fresh and not gone:
        return "running", ""
    if waits:
        return "queued", queued.reason if "held" in queued.reason.lower() else ""
    if queued is not None:
        hangs = locked and not gone  # nor fresh; the lock of a process that is gone says nothing of the next one
        return ("stale", "its job runs, but no heartbeat comes") if hangs else ("running", "")
    if locked and gone:
        return "killed", job.error or f"its process is gone; {GOES_ON}"
    if status.get("state") == "interrupted":
        signalled = "by a warning signal" + (", and its job is gone (was it cancelled?)" if job.submission else "")
        return "interrupted", f"{status.get('error') or job.error or signalled}; {GOES_ON}"
    if job.error is not None:
        return "failed", job.error
    if status.get("state") == "failed":
        return "failed", status.get("error", "")
    if queue is None and job.submission:
        return "queued", "SLURM does not answer; it was submitted"
    if locked:
        return "stale", "no heartbeat comes: its process or its host is gone"
    if status:
        return "failed", "it ended before it was done, and nothing brings it back (was its job cancelled?)"
    return "missing", ""


def is_fresh(lock_file: Path, step_seconds: float) -> bool:
    """Tells whether the heartbeat is young enough for its process to be taken for alive."""
    try:
        age = time.time() - lock_file.stat().st_mtime
    except FileNotFoundError:
        return False
    return age <= max(STALE_AFTER_SECONDS, STALE_AFTER_STEPS * step_seconds)


def has_gone(lock: dict, queue: set[str] | None) -> bool:
    """Tells whether the process that a lock names is known to be no more, whatever its last heartbeat."""
    if is_here(lock):
        return not has_process(lock)
    return queue is not None and bool(lock.get("job")) and lock["job"] not in queue


def last_rows(file: Path) -> list[dict]:
    """Returns the last rows of a jsonl file, without reading the rest of it."""
    if not file.exists():
        return []
    with open(file, "rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - TAIL_BYTES))
        lines = opened.read().split(b"\n")
    rows = []
    for line in lines[-RECENT_ROWS - 1 :]:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # the first may be cut by the seek, the last by a writer
    return rows


def state_table(states: list[RunState]) -> Table:
    """Returns a table with a row per run."""
    table = Table(Column("run", overflow="fold"), "state", "step", "progress", "accuracy", "tokens", "ETA", "job")
    table.add_column("error", overflow="fold")
    for state, name in zip(states, distinct_names([state.run for state in states]), strict=True):
        share = state.step / state.steps if state.steps else 0.0
        colour = COLOURS[state.state]
        table.add_row(
            name,
            f"[{colour}]{state.state}[/]" if colour else state.state,
            f"{state.step}/{state.steps}",
            f"{'━' * math.floor(10 * share):╌<10}",
            "" if state.accuracy is None else f"{state.accuracy:.3f}",
            f"{state.tokens:,.0f}",
            "" if state.seconds_left is None else str(timedelta(seconds=round(state.seconds_left))),
            state.job,
            last_line(state.error),
        )
    return table


def last_line(error: str) -> str:
    """Returns the last line of an error, escaped for rich; "" for no error."""
    lines = error.strip().splitlines()
    return lines[-1].strip().replace("[", r"\[") if lines else ""


def counts(states: list[RunState]) -> str:
    """Returns how many runs are in each state: `3 done, 1 running`."""
    names = [state.state for state in states]
    return ", ".join(f"{names.count(name)} {name}" for name in COLOURS if name in names)
