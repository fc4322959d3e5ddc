"""environment.json says what a run ran with, so that it can be run again. experiments/running/train.py writes it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from otb.files import write_atomically
from otb.records import RunDirectory

PACKAGES = ("otb", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "vllm")
ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT_FACTS = "snapshot.json"  # in a copy of the code: the commit and the diff that it was made of
STARTS = "starts"  # one entry per start of the run: the first, and every resume
PER_START = ("started", "host", "job_id", "commit", "diff_sha256", "devices", "threads")


def describe(command: list[str], directory: RunDirectory, facts: dict) -> str:
    """Returns the text of environment.json. facts: what is known of model and data.

    Top-level values are those of the latest start; `starts` keeps what may differ between the starts of one run. Writes
    code.diff where the working tree differs from the commit.
    """
    import torch

    diff = working_tree_diff()
    if diff:
        write_atomically(directory.path / "code.diff", diff)
    now = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "python": platform.python_version(),
        "versions": {name: number for name in PACKAGES if (number := installed(name))},
        "commit": commit(),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "cuda": torch.version.cuda,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "executable": sys.executable,
        **facts,
    }
    starts = [*earlier_starts(directory), {name: now[name] for name in PER_START}]
    return json.dumps(now | {STARTS: starts}, indent=1, default=str) + "\n"


def number_of_processes(directory: RunDirectory) -> int | None:
    """Returns how many processes the latest start had; None where no start is known."""
    try:
        return json.loads(directory.environment_file.read_text(encoding="utf8")).get("processes")
    except FileNotFoundError:
        return None


def earlier_starts(directory: RunDirectory) -> list[dict]:
    """Returns the starts that environment.json lists so far."""
    try:
        return json.loads(directory.environment_file.read_text(encoding="utf8")).get(STARTS, [])
    except FileNotFoundError:
        return []


def other_threads(directory: RunDirectory) -> str:
    """Returns a line where the latest start computed on another number of threads than this one will; "" elsewhere."""
    import torch

    now, starts = torch.get_num_threads(), earlier_starts(directory)
    before = starts[-1].get("threads", now) if starts else now
    if before == now:
        return ""
    return f"going on with threads={now} instead of {before}: sums are rounded in another order, so its numbers differ"


def commit() -> str | None:
    """Returns the commit of the project, or of the project that this code is a copy of; None without git."""
    if (facts := snapshot_facts()) is not None:
        return facts["commit"]
    return git("rev-parse", "HEAD").strip() or None


def snapshot_facts() -> dict | None:
    """Returns commit and diff of the project that this code is a copy of; None where it is the project itself."""
    try:
        return json.loads((ROOT / SNAPSHOT_FACTS).read_text(encoding="utf8"))
    except FileNotFoundError:
        return None


def working_tree_diff() -> str:
    """Returns what differs from the commit, with the names of files that git does not track; "" where nothing does."""
    if (facts := snapshot_facts()) is not None:
        return facts["diff"]
    untracked = git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml")
    return git("diff", "HEAD") + "".join(f"untracked: {name}\n" for name in untracked.splitlines())


def installed(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str:
    """Returns the output of a git command in the project's folder; "" where there is no git or no repository."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
