"""Time to load a folder of runs for analysis: `python benchmarks/loading.py [RUNS]`, under a minute for 1,000 runs.

The runs are copies of those in tests/data/runs, 80 steps each. Cold: nothing is cached; warm: nothing has changed;
one run changed: the others come from the cache.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from analysis.runs.load import load

REAL_RUNS = sorted((Path(__file__).resolve().parents[1] / "tests" / "data" / "runs").iterdir())


def seconds(folder: Path) -> float:
    started = time.perf_counter()
    load(folder)
    return time.perf_counter() - started


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            original = REAL_RUNS[number % len(REAL_RUNS)]
            shutil.copytree(original, Path(folder) / f"{number:05d}" / original.name)
        print(f"{runs} runs, cold: {seconds(Path(folder)):.2f} s")
        print(f"{runs} runs, warm: {seconds(Path(folder)):.2f} s")
        with open(next(Path(folder).glob("*/*/metrics.jsonl")), "a") as file:
            file.write('{"step": 81, "accuracy": 0.5}\n')
        print(f"{runs} runs, one of them changed: {seconds(Path(folder)):.2f} s")


if __name__ == "__main__":
    main()
