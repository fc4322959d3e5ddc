"""Reads and writes the run directory. It imports no torch, because analysis, SLURM and the command line use it.

config.yaml         the resolved configuration          environment.json   versions, commit, host, data
metrics.jsonl       a row per step, append-only         evaluations.jsonl  a row per evaluation
status.json         state and progress                  rollouts/          samples, a parquet file per kept step
checkpoints/        step-00000040/, complete or absent  discarded.jsonl    rows that a resume replaced
evaluations/        a row per evaluated sample, parquet  lock.json         the process that writes, see lock_file.py
run_id              the name of this run at a tracker
begun_by            the sweep or SLURM job that first started this run, if any
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from otb.errors import RunError, unwritable
from otb.files import sync_file, sync_tree, write_atomically, write_once
from otb.records.lock_file import has_process, is_here, read_lock


def read_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a jsonl file, except a last line that a crash cut short; nothing if there is no file."""
    if not path.exists():
        return
    with open(path, encoding="utf8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    raise RunError(
                        f"{path} holds a damaged line: {line[:80]!r}. Every line but the last must be a JSON object. "
                        "Restore the file, or start over with overwrite=true."
                    ) from None


class RunDirectory:
    """One run: its files, its progress, its checkpoints. A single process writes (`RunLock`); others may read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.discarded_file = self.path / "discarded.jsonl"
        self.status_file = self.path / "status.json"
        self.lock_file = self.path / "lock.json"
        self.run_id_file = self.path / "run_id"
        self.begun_by_file = self.path / "begun_by"
        self.rollouts = self.path / "rollouts"
        self.evaluations = self.path / "evaluations"
        self.checkpoints = self.path / "checkpoints"

    # ---- status

    def status(self) -> dict:
        """Returns the last status, {} for a new run.

        Keys: state (running, finished, failed, interrupted), step, steps, updated, error.
        """
        try:
            return json.loads(self.status_file.read_text(encoding="utf8"))
        except FileNotFoundError:
            return {}

    def state(self) -> str | None:
        """Returns the state of the status, or "killed" where it is "running" and its process is known to be gone.

        None for a new run. Nothing is written: the next start of the run does that.
        """
        holder = read_lock(self.lock_file)  # first: a run that ends meanwhile leaves its last status behind
        state = self.status().get("state")
        return "killed" if state == "running" and is_here(holder) and not has_process(holder) else state

    def write_status(self, state: str, **facts) -> None:
        """Replaces the status. Raises RunError if it cannot be written."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomically(self.status_file, json.dumps({"state": state, "updated": now, **facts}, indent=1) + "\n")

    def run_id(self) -> str:
        """Returns the run's name at a tracker, eight characters; a resume keeps it, overwrite=true renews it."""
        if not self.run_id_file.exists():
            write_once(self.run_id_file, secrets.token_hex(4))  # all processes of a run call this at the same time
        return self.run_id_file.read_text(encoding="utf8").strip()

    def begun_by(self) -> str | None:
        """Returns the sweep or job that `note_beginning` recorded, None without one."""
        try:
            return self.begun_by_file.read_text(encoding="utf8").strip()
        except FileNotFoundError:
            return None

    def note_beginning(self, started_by: str | None) -> None:
        """Records the sweep or job that begins this run; a restart then knows that overwrite=true was obeyed."""
        if started_by is not None:
            write_atomically(self.begun_by_file, started_by)

    def evaluation_samples(self, step: int) -> Path:
        """Returns the path for the samples of an evaluation, whether or not it exists."""
        return self.evaluations / f"step-{step:08d}.parquet"

    # ---- rows

    def append(self, file: Path, row: dict) -> None:
        """Appends one line completely or not at all, as far as the operating system is concerned.

        Raises RunError if it cannot be written, ValueError for NaN or infinity, which JSON does not have.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                end = os.fstat(descriptor).st_size
                try:
                    while line:
                        line = line[os.write(descriptor, line) :]
                except OSError:
                    os.ftruncate(descriptor, end)  # a full disk keeps the first part of a line
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(file, error) from error

    def last_metrics(self) -> dict:
        """Returns the last metrics row, {} if there is none."""
        row: dict = {}
        for row in read_rows(self.metrics_file):  # noqa: B007 - the last row is returned
            pass
        return row

    def discard_after(self, step: int) -> int:
        """Moves metric and evaluation rows of steps after `step` to discarded.jsonl, and returns their number."""
        kept, discarded = {}, []
        for file in (self.metrics_file, self.evaluations_file):
            rows = list(read_rows(file))
            kept[file] = [row for row in rows if row["step"] <= step]
            discarded += [{"file": file.name, **row} for row in rows if row["step"] > step]
        earlier = list(read_rows(self.discarded_file))
        if (
            discarded
        ):  # written first: a kill before the next write then loses no row, and `not in earlier` doubles none
            write_rows(self.discarded_file, earlier + [row for row in discarded if row not in earlier])
        for file, rows in kept.items():
            if file.exists():  # rewritten even if it loses no row: a crash may have cut its last line
                write_rows(file, rows)
        for folder in (self.rollouts, self.evaluations):
            for sample in folder.glob("step-*.parquet"):  # failed-*.parquet is kept as evidence
                if sample_step(sample) > step:
                    sample.unlink()
        return len(discarded)

    # ---- checkpoints

    def checkpoint(self, step: int) -> Path:
        """Returns the path for the checkpoint of a step, whether or not it exists."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending; a folder with its final name is complete."""
        names = (path.name for path in self.checkpoints.glob("step-*"))
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    def publish_checkpoint(self, written: Path, step: int) -> Path:
        """Makes a fully written folder a checkpoint by fsync and rename, so no checkpoint is ever incomplete.

        The rows of its steps reach the disk first, so they exist even after a power failure. Raises OSError.
        """
        for file in (self.metrics_file, self.evaluations_file):
            sync_file(file)
        sync_tree(written)
        final = self.checkpoint(step)
        os.rename(written, final)
        sync_file(self.checkpoints)
        return final

    def best_checkpoint_step(self) -> int | None:
        """Returns the step of the checkpoint with the highest evaluated accuracy; the earliest if there are several."""
        complete = set(self.checkpoint_steps())
        rows = (row for row in read_rows(self.evaluations_file) if row["step"] in complete and "accuracy" in row)
        scores = {row["step"]: row["accuracy"] for row in rows}
        return max(scores, key=lambda step: (scores[step], -step), default=None)

    def prune_checkpoints(self, resume_files: tuple[str, ...]) -> None:
        """Deletes all checkpoints but the last and the best, and the best's `resume_files` (patterns)."""
        steps = self.checkpoint_steps()
        best = self.best_checkpoint_step()
        for step in steps[:-1]:
            if step != best:
                aside = self.checkpoints / f".old-{step:08d}"
                os.rename(self.checkpoint(step), aside)  # its name says at once that it is incomplete
                shutil.rmtree(aside)
                continue
            for pattern in resume_files:
                for path in self.checkpoint(step).glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def clear_unfinished(self) -> None:
        """Removes files and folders that a killed process left half-written."""
        for pattern in (".writing*", ".old-*"):
            for path in self.checkpoints.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        folders = (self.path, self.rollouts, self.evaluations)
        for path in [path for folder in folders for path in folder.glob(".*.[0-9]*")]:
            if not path.name.startswith(".lock"):  # another process may be taking the lock
                path.unlink(missing_ok=True)


def write_rows(file: Path, rows: list[dict]) -> None:
    """Replaces the rows of a jsonl file; after a crash it holds either the old rows or the new ones."""
    write_atomically(file, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def sample_step(sample: Path) -> int:
    """Returns the step of a sample file, such as step-00000040.parquet or failed-00000041-rank1.parquet."""
    return int(re.findall(r"\d+", sample.stem)[0])


def timestamp() -> str:
    """Returns the current time in the form used in file names, such as 20260131-235959."""
    return time.strftime("%Y%m%d-%H%M%S")
