"""What the jobs of a sweep leave for its summary: they may run in other processes, or on other machines."""

from __future__ import annotations

import json
from pathlib import Path

from otb.records import RunError, write_atomically


class JobFile:
    """`with JobFile(...)`: job-00003.json says where a job's run lives and, unless it ended well, why it did not."""

    def __init__(self, folder: Path, number: int, run: Path):
        self.file, self.run = folder / f"job-{number:05d}.json", run

    def __enter__(self) -> JobFile:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._write("it was killed, or is still running")
        return self

    def __exit__(self, kind, error, traceback) -> None:
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        self._write(None if error is None else reason)

    def _write(self, error: str | None) -> None:
        write_atomically(self.file, json.dumps({"run": str(self.run), "error": error}) + "\n")


def read_jobs(folder: Path) -> list[tuple[Path, str | None]]:
    """(run directory, error or None) of each job, in the sweep's order."""
    jobs = (json.loads(file.read_text(encoding="utf8")) for file in sorted(folder.glob("job-*.json")))
    return [(Path(job["run"]), job["error"]) for job in jobs]
