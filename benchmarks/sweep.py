"""Times a sweep of tiny runs: its wall time over the time that its steps and evaluations take when they fill all cores.

python benchmarks/sweep.py --runs 12     # two minutes on two cores that do nothing else
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = Path(__file__).resolve().parent.parent / "experiments" / "run.py"


def measure(runs: int) -> tuple[float, float]:
    """Returns the seconds of a sweep of so many default runs, and those of all steps and evaluations in it."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = ",".join(map(str, range(runs)))
        started = time.perf_counter()
        subprocess.run([sys.executable, str(COMMAND), "-m", f"seed={seeds}", f"runs_dir={folder}"], check=True)
        wall = time.perf_counter() - started
        return wall, total(folder, "metrics.jsonl", "seconds_step") + total(folder, "evaluations.jsonl", "seconds")


def total(folder: str, file: str, name: str) -> float:
    """Returns the sum of a column over the files of that name of all runs."""
    lines = [line for path in Path(folder).glob(f"*/*/{file}") for line in path.read_text(encoding="utf8").splitlines()]
    return sum(json.loads(line)[name] for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=12)
    wall, work = measure(parser.parse_args().runs)
    cores = len(os.sched_getaffinity(0))
    print(f"{wall:.0f} s for {work:.0f} s of steps and evaluations on {cores} cores: {wall / (work / cores):.2f}")
