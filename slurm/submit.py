"""Submits the runs of a sweep to SLURM as job arrays. hydra/launcher=slurm calls it. Imports no torch.

submitit writes the sbatch file and submits it. The job runs `python -m slurm.job`, not a pickled function, and
everything that it reads is on disk before sbatch is called. It therefore does not matter what happens to this process.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock
from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from experiments.sweeps.display import SweepDisplay
from experiments.sweeps.jobs import Job, earlier_jobs, load_jobs, save_jobs
from experiments.sweeps.runs_of import folder_of, plan
from experiments.sweeps.snapshot import take_snapshot
from otb.errors import CRASHED, STOPPED_FROM_KEYBOARD, RunError
from otb.files import write_atomically
from otb.records import timestamp
from slurm.states import certain_states, states_of

NOT_OF_SBATCH = ("wait", "max_restarts", "max_num_timeout", "container", "srun_args", "submitit_folder")
LARGEST_ARRAY = 1000  # SLURM's own default of MaxArraySize is 1001
POLL_SECONDS = 5.0


def launch(loader: ConfigLoader, sweep: DictConfig, job_overrides: Sequence[Sequence[str]], options: dict) -> None:
    """Submits all runs that are not done, queued or running; waits for their end unless wait=false.

    Raises RunError for an invalid sweep; with wait=false, exits with CRASHED if some of its runs were refused.
    """
    jobs = plan(loader, sweep, job_overrides, options["nodes"] * options["tasks_per_node"], here=False)
    folder = folder_of(sweep)
    with FileLock(folder / ".submitting.lock"):  # two equal commands at a time submit the runs once
        known = adopt(folder, jobs)
        finished = set() if sweep.overwrite else {"done"}
        states = dict(zip((job.number for job in jobs), certain_states(folder, jobs), strict=True))
        over = [job for job in jobs if states[job.number].over]
        refused = [job for job in jobs if job.error is not None]
        to_send = [job for job in over if job.error is None and states[job.number].state not in finished]
        for job in refused if not options["wait"] else ():  # otherwise the table shows them
            print(f"{job.number}: refused: {job.error}", file=sys.stderr)
        # The file of a queued or running run belongs to its job, even if the current code refuses the run.
        refused_now = [job for job in over if job.error]
        new = [job for job in jobs if job.number not in known and job not in refused_now + to_send]
        save_jobs(folder, refused_now + new)
        ids = []
        if to_send:
            code = str(take_snapshot(folder / ".code"))
            facts = {"options": options, "code": code, "python": sys.executable, "directory": os.getcwd()}
            facts["sweep"] = secrets.token_hex(8)  # `resend` keeps it
            ids = send(folder, to_send, facts)
    print(
        f"{len(to_send)} of {len(jobs)} runs submitted" + (f" as job {', '.join(ids)}" if ids else "")
        + f", {len(refused)} refused, {len(jobs) - len(to_send) - len(refused)} already done, queued or running. "
        f"To see their states: python -m slurm.status {os.path.relpath(folder)}"
    )  # fmt: skip
    if options["wait"]:
        wait(folder)  # the launcher then prints the table and sets the exit code
    elif refused:
        sys.exit(CRASHED)


def adopt(folder: Path, jobs: list[Job]) -> set[int]:
    """Takes over the job files of an earlier submission, and returns the numbers of the jobs that have one.

    A submission that was killed may have written only some. Raises RunError if they belong to another sweep.
    """
    earlier = earlier_jobs(folder, jobs)
    for before in earlier:
        jobs[before.number].submission, jobs[before.number].job = before.submission, before.job
    return {before.number for before in earlier}


def resend(folder: Path, jobs: list[Job]) -> list[str]:
    """Submits runs again, unchanged. Returns the ids of the job arrays."""
    ids = []
    for token in sorted({job.submission for job in jobs}):
        submission = json.loads((folder / "submissions" / f"{token}.json").read_text(encoding="utf8"))
        ids += send(folder, [job for job in jobs if job.submission == token], submission)
    return ids


def send(folder: Path, jobs: list[Job], submission: dict) -> list[str]:
    """Submits runs as job arrays and returns their ids. submission: options, code, python, directory of the jobs."""
    ids = []
    (folder / "submissions").mkdir(exist_ok=True)
    for start in range(0, len(jobs), LARGEST_ARRAY):
        part = jobs[start : start + LARGEST_ARRAY]
        token = f"{timestamp()}-{secrets.token_hex(2)}"
        submission = submission | {"numbers": [job.number for job in part]}
        for job in part:
            job.submission, job.job = token, None
            # `starts` stays: a run that was submitted before resumes, even with overwrite=true
            job.error, job.timeouts, job.kills, job.kills_at = None, 0, 0, -1
        file = folder / "submissions" / f"{token}.json"
        write_atomically(file, json.dumps(submission, indent=1) + "\n")  # written before the job files that refer to it
        save_jobs(folder, part)
        ids.append(sbatch(folder, token, submission))
        write_atomically(file, json.dumps(submission | {"array": ids[-1]}, indent=1) + "\n")  # helps to find the logs
    return ids


def sbatch(folder: Path, token: str, submission: dict) -> str:
    """Submits one job array and returns its id. Raises RunError if SLURM refuses it or is not installed."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    options, code = submission["options"], submission["code"]
    path = os.pathsep.join(filter(None, [code, os.getenv("PYTHONPATH")]))
    setup = [*(options["setup"] or []), f"export PYTHONPATH={shlex.quote(path)} PYTHONUNBUFFERED=1", "trap : TERM USR2"]
    # If slurm.job, which puts its run back into the queue, is itself killed, the shell does it instead. But not after
    # SIGTERM (143), with which SLURM requeues or cancels. SLURM_JOB_ID may be the id of the whole array.
    again = 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    killed = '[ $code -gt 128 ] && [ $code -ne 143 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]'
    teardown = ["code=$?", f"if {killed}; then {again}; fi", "exit $code"]
    extra = {"requeue": True, "chdir": submission["directory"]} | (options["additional_parameters"] or {})
    parameters = {name: value for name, value in options.items() if name not in NOT_OF_SBATCH and value is not None}
    parameters |= {"name": f"{folder.name}.{token}", "setup": setup, "teardown": teardown, "use_srun": False}
    parameters |= {"additional_parameters": extra}
    words = [submission["python"], "-P", "-m", "slurm.job", str(folder), token]
    try:
        executor = SlurmExecutor(folder / "logs")
        # Private methods here and below, because the public submit() submits a pickled function, not a command.
        executor.update_parameters(**executor._convert_parameters(parameters))
        executor.parameters["map_count"] = len(submission["numbers"])
        executor.folder.mkdir(exist_ok=True)
        return executor._submit_command(shlex.join(words)).job_id
    except (RuntimeError, FailedJobError, FailedSubmissionError, ValueError) as error:
        raise RunError(
            f"SLURM did not accept the jobs: {str(error).strip().splitlines()[-1]}. hydra/launcher=slurm needs sbatch "
            "and srun, and a partition, account, ... that this cluster knows (slurm/README.md)."
        ) from error


def wait(folder: Path) -> None:
    """Waits until no run of the sweep is queued or running. Ctrl-C ends the waiting, not the jobs."""
    try:
        with SweepDisplay() as display:
            while True:
                states, _ = states_of(folder, load_jobs(folder))
                display.show(states)
                if all(state.over for state in states):
                    break
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        print("\nno longer waiting; the jobs stay in the queue (scancel removes them)", file=sys.stderr)
        sys.exit(STOPPED_FROM_KEYBOARD)
    for job, state in zip(load_jobs(folder), states, strict=True):
        if state.state != "done" and job.error is None:
            job.error = state.error or state.state
            job.save(folder)
