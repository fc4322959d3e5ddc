"""Runs a real SLURM for the tests, and the commands that a user types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, SHORT_RUN
from tests.support.economy import NO_PICTURES
from tests.support.waiting import PATIENCE_SECONDS

SCRIPT = ROOT / "slurm" / "local_cluster.sh"


class Cluster:
    """Starts slurm/local_cluster.sh in `folder`, with `cpus` per node, and runs commands that use it.

    extra: environment variables of every job.
    """

    def __init__(self, folder: Path, nodes: int, cpus: int):
        self.folder = folder
        self.variables = os.environ | {"OTB_CLUSTER_NODES": str(nodes), "OTB_CLUSTER_CPUS": str(cpus)}
        self.variables |= {"PYTHONPATH": str(ROOT), NO_PICTURES: "1"}
        self.variables |= {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def script(self, what: str) -> str:
        return self.command(str(SCRIPT), what, str(self.folder))

    def command(self, *words: str, **extra: str) -> str:
        variables = self.variables | extra
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sweep(self, runs_dir: Path, *arguments: str, launcher: str = "slurm_cpu", **extra: str):
        """Runs `python experiments/run.py -m ...` with short runs."""
        changed = {argument.split("=")[0] for argument in arguments}
        short = [f"{key}={value}" for key, value in SHORT_RUN.items() if key not in changed]
        command = [sys.executable, str(ROOT / "experiments" / "run.py"), "-m", f"hydra/launcher={launcher}", *short]
        return subprocess.run(
            [*command, f"runs_dir={runs_dir}", *arguments],
            cwd=runs_dir.parent,
            env=self.variables | extra,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def status(self, folder: Path, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "slurm.status", str(folder), *options]
        done = subprocess.run(
            command, env=self.variables, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    def queue(self) -> list[str]:
        return self.command("squeue", "--noheader", "--array", "--format=%F_%K %T").split("\n")[:-1]


def job_files(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("job-*.json"))]
