"""environment.json: what a run ran with, so that it can be run again. No torch before it is imported anyway."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("otb", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "vllm")
ROOT = Path(__file__).resolve().parent.parent


def describe(command: list[str], run_directory: Path) -> dict:
    """Versions, commit, host, devices, threads, job id, command. Writes code.diff where the tree differs from it."""
    import torch

    diff = git("diff", "HEAD")
    if diff:
        (run_directory / "code.diff").write_text(diff, encoding="utf8")
    return {
        "command": command,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
        "commit": git("rev-parse", "HEAD").strip() or None,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu"],
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "executable": sys.executable,
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str:
    """Output of a git command in the project's folder; "" where there is no git or no repository."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
