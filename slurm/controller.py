"""Asks SLURM with its own commands, squeue and scontrol, without accounting. All of slurm/ uses it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

from experiments.sweeps.jobs import load_job
from experiments.sweeps.state import Queued

SECONDS_PER_COMMAND = 60
PATIENCE_SECONDS = 600.0  # a controller may be restarting


def queued_runs(folder: Path) -> tuple[dict[str, Queued], set[str]] | None:
    """Returns {run directory: queued run} of this and neighbouring sweeps, and the SLURM_JOB_ID of all jobs.

    None if SLURM does not answer. A job array is named FOLDER.SUBMISSION, and submissions/SUBMISSION.json was written
    before the array was submitted, so the result is right even if the submitting process was killed.
    """
    form = "%A|%F|%K|%T|%r|%j"
    try:
        owner = folder.stat().st_uid  # another user may be asking
        listed = command("squeue", f"--user={owner}", "--noheader", "--array", f"--format={form}")
    except (OSError, subprocess.SubprocessError):
        return None
    runs, raw_ids, numbers = {}, set(), {}
    for line in listed.splitlines():
        raw, array, index, state, reason, name = line.split("|", 5)
        raw_ids.add(raw)
        sweep, _, token = name.rpartition(".")
        file = folder.parent / sweep / "submissions" / f"{token}.json"
        if name not in numbers:
            numbers[name] = json.loads(file.read_text(encoding="utf8"))["numbers"] if file.is_file() else None
        if numbers[name] is not None and index.isdigit():
            run = load_job(folder.parent / sweep, numbers[name][int(index)]).run
            runs[run] = Queued(f"{array}_{index}", state, reason)
    return runs, raw_ids


def job_facts(job: str) -> dict[str, str]:
    """Returns JobState, EndTime, ... of a job; {} if SLURM does not know it."""
    try:
        line = command("scontrol", "show", "job", "--oneliner", job)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", line))


def end_time(facts: dict[str, str]) -> float | None:
    """Returns when SLURM will end the job, in seconds since the epoch; None if there is no limit."""
    try:
        return datetime.fromisoformat(facts.get("EndTime", "")).timestamp()
    except ValueError:
        return None


def requeue(job: str) -> None:
    """Puts a job back into the queue as soon as the controller answers. Raises subprocess.SubprocessError."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            command("scontrol", "requeue", job)
            return
        except subprocess.SubprocessError:
            if time.monotonic() > deadline:
                raise
            time.sleep(5.0)


def command(*words: str) -> str:
    """Returns the output of a command. Raises OSError, subprocess.SubprocessError."""
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=SECONDS_PER_COMMAND)
    return done.stdout
