"""Looks at a sweep: run directories first, then SLURM, then the logs. Used by slurm/submit.py and slurm/status.py."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.sweeps.jobs import Job, reason_in
from experiments.sweeps.state import RunState, state_of
from slurm.controller import queued_runs


def look(folder: Path, jobs: list[Job]) -> tuple[list[RunState], str]:
    """-> the states of the runs, and a note where SLURM did not answer."""
    asked = queued_runs(folder)
    runs, raw_ids = asked or ({}, None)
    sent = any(job.submission for job in jobs)
    note = "SLURM does not answer: from the run directories alone" if asked is None and sent else ""
    states = [state_of(job, runs.get(job.run), raw_ids) for job in jobs]
    return [explained(folder, job, state) for job, state in zip(jobs, states, strict=True)], note


def explained(folder: Path, job: Job, state: RunState) -> RunState:
    """The job of a run that never began may have said why."""
    if state.state != "missing" or not job.submission:
        return state
    for log in log_files(folder, job):
        return state._replace(state="failed", error=reason_in(log.read_text(encoding="utf8", errors="replace")))
    return state._replace(error="its job left the queue before it began, or SLURM did not take it")


def log_files(folder: Path, job: Job) -> list[Path]:
    """What the processes of a run printed; the first one's first."""
    name = job.job
    if name is None and job.submission:
        submission = json.loads((folder / "submissions" / f"{job.submission}.json").read_text(encoding="utf8"))
        name = f"{submission.get('array')}_{submission['numbers'].index(job.number)}"
    return sorted((folder / "logs").glob(f"{name}_*_log.out" if name else f"{job.number:05d}.log"))
