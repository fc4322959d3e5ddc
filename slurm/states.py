"""Finds the states of a sweep's runs: from their directories first, then from SLURM, then from the logs.

slurm/submit.py and slurm/status.py use it.
"""

from __future__ import annotations

import json
from pathlib import Path

from experiments.sweeps.jobs import Job, reason_in
from experiments.sweeps.state import RunState, state_of
from otb.errors import RunError
from slurm.controller import queued_runs


def states_of(folder: Path, jobs: list[Job]) -> tuple[list[RunState], str]:
    """Returns the states of the runs, and a note if SLURM did not answer."""
    answer = queued_runs(folder)
    runs, queue = answer or ({}, None)
    sent = any(job.submission for job in jobs)
    note = "SLURM does not answer: states from the run directories only" if answer is None and sent else ""
    states = [state_of(job, runs.get(job.run), queue) for job in jobs]
    return [explained(folder, job, state) for job, state in zip(jobs, states, strict=True)], note


def certain_states(folder: Path, jobs: list[Job]) -> list[RunState]:
    """Returns the states of the runs. Raises RunError if SLURM did not say what is queued."""
    states, note = states_of(folder, jobs)
    if note:  # a run might be submitted twice
        raise RunError(
            "SLURM does not answer (squeue), so the queued runs are not known; nothing was submitted. Try again when "
            "it answers, or use hydra/launcher=local."
        )
    return states


def explained(folder: Path, job: Job, state: RunState) -> RunState:
    """Returns the state; if a run is missing, it adds the reason from the logs of its job."""
    if state.state != "missing" or not job.submission:
        return state
    for log in log_files(folder, job):
        return state._replace(state="failed", error=reason_in(log.read_text(encoding="utf8", errors="replace")))
    return state._replace(error="its job left the queue before it began, or SLURM did not accept it")


def log_files(folder: Path, job: Job) -> list[Path]:
    """Returns the logs of a run's processes, the first process's log first."""
    name = job.job
    if name is None and job.submission:
        submission = json.loads((folder / "submissions" / f"{job.submission}.json").read_text(encoding="utf8"))
        name = f"{submission.get('array')}_{submission['numbers'].index(job.number)}"
    return sorted((folder / "logs").glob(f"{name}_*_log.out" if name else f"{job.number:05d}.log"))
