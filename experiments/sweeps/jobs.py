"""The folder of a sweep: what it is called, and what is known of each of its jobs, wherever they run. Imports no torch.

runs/sweep-1a2b3c4d/
  job-00003.json   one run: its directory, its overrides, its SLURM job, how often it was started, why it failed
  logs/            what the jobs print
  submissions/     SLURM: which runs a job array is made of
  .code/           the code that the jobs run; hidden, so that nothing takes its files for a run's
  multirun.yaml    what Hydra made of the command
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from otb.errors import RunError
from otb.files import write_atomically
from otb.records import RunDirectory
from otb.records.config_keys import WHERE_AND_HOW, is_one_of


@dataclass
class Job:
    """One run of a sweep. Its file is written by the process that plans it, then by the one that runs it."""

    number: int
    run: str  # its directory, absolute
    overrides: list[str] = dataclasses.field(default_factory=list)
    steps: int = 0
    error: str | None = None  # why it was refused or failed; None while nothing is known
    submission: str | None = None  # the job array that it was last sent in
    job: str | None = None  # SLURM's name of it, such as 71_3
    starts: int = 0
    timeouts: int = 0
    kills: int = 0  # in a row, without a checkpoint in between
    kills_at: int = -1  # step of the last checkpoint when it was killed last

    def save(self, folder: Path) -> None:
        """Writes the job's file into the folder of its sweep."""
        write_atomically(folder / f"job-{self.number:05d}.json", json.dumps(dataclasses.asdict(self)) + "\n")


def save_jobs(folder: Path, jobs: list[Job]) -> None:
    """Writes the jobs' files side by side, because each waits for the disk."""
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(lambda job: job.save(folder), jobs):
            pass


def load_job(folder: Path, number: int) -> Job:
    """Reads one job's file."""
    return Job(**json.loads((folder / f"job-{number:05d}.json").read_text(encoding="utf8")))


def load_jobs(folder: Path) -> list[Job]:
    """Reads the jobs of a sweep, in its order. Raises RunError where the folder holds no sweep."""
    numbers = sorted(int(file.stem.removeprefix("job-")) for file in Path(folder).glob("job-*.json"))
    if not numbers:
        raise RunError(
            f"{folder} is no folder of a sweep: it holds no job-*.json. `python -m slurm.status RUNS_DIR` lists "
            "the sweeps of a folder of runs."
        )
    return [load_job(Path(folder), number) for number in numbers]


def earlier_jobs(folder: Path, jobs: list[Job]) -> list[Job]:
    """Returns the jobs that the folder holds already. Raises RunError where they are of another sweep than `jobs`."""
    earlier = load_jobs(folder) if any(folder.glob("job-*.json")) else []
    for before in earlier:
        if before.number >= len(jobs) or jobs[before.number].run != before.run:
            raise RunError(
                f"{folder} is the folder of a sweep over other runs, such as {before.run}; a job number must mean one "
                "run. Choose another sweep=NAME; what is done, queued or running is not sent again."
            )
    return earlier


class JobFile:
    """Keeps the job file of a run in this very process, `with JobFile(...):`, for launchers that know no job files."""

    def __init__(self, folder: Path, number: int, run: Path):
        self.folder, self.job = folder, Job(number, str(run))

    def __enter__(self) -> JobFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.job.error = "it was killed, or is still running"
        self.job.save(self.folder)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        self.job.error = None if error is None else reason
        self.job.save(self.folder)


def sweep_arguments(arguments: list[str]) -> list[str]:
    """Returns the command line of a sweep as Hydra takes it, with `sweep=NAME`, `wait=BOOL` and a folder.

    Without a name the folder follows from the command, so that the same command finds its jobs again. Keys that say
    only where and how runs are made name no other sweep, nor does anything about the launcher. Raises RunError.
    """
    if not {"-m", "--multirun"} & set(arguments):
        for argument in arguments:
            if re.match(r"(hydra/launcher|sweep|wait)=", argument) and not any(a.startswith("--") for a in arguments):
                raise RunError(f"{argument} belongs to a sweep. Add -m, for a single run too.")
        return arguments
    for_hydra, content, named = [], [], False
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        if key == "sweep":
            argument = f"hydra.sweep.dir=${{runs_dir}}/{value}"
        if key == "wait":
            argument = f"hydra.launcher.wait={value}"
        named = named or key in ("sweep", "hydra.sweep.dir")
        for_hydra.append(argument)
        launching = re.match(r"hydra(/launcher|\.launcher|\.sweep\b)|wait$|sweep$", key)
        if not launching and not is_one_of(key, WHERE_AND_HOW):
            content.append(argument)
    if not named:
        digest = hashlib.sha256("\n".join(sorted({*content} - {"-m", "--multirun"})).encode()).hexdigest()[:8]
        overrides = [place for place, text in enumerate(for_hydra) if "=" in text and not text.startswith("-")]
        place = min(overrides, default=len(for_hydra))  # among them: Hydra takes none that an option parts from others
        for_hydra.insert(place, f"hydra.sweep.dir=${{runs_dir}}/sweep-{digest}")
    return for_hydra


def may_restart(job: Job, limit: int) -> bool:
    """Notes that the run was killed, and tells whether it may be started again: it got on, or was killed seldom."""
    reached = max(RunDirectory(job.run).checkpoint_steps(), default=0)
    job.kills = 1 if reached > job.kills_at else job.kills + 1
    job.kills_at = reached
    return job.kills <= limit


def reason_in(log: str) -> str:
    """Returns why a run ended: what it printed after the last `error: `, or its last line. Leaves out SLURM's lines."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :]).removeprefix("error: ").strip()
    return lines[-1].strip() if lines else "it printed nothing"
