"""How long commands take to answer: `python benchmarks/startup.py [REPEATS]`, about a minute.

Help, refusals and the sending of a sweep have to come at once, which is why they import no torch (the tests check
that). For each command the best and the median of REPEATS starts: seconds on the clock, which other work on the same
cores makes longer, and seconds of the processor.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN, VARIANCE = str(ROOT / "experiments" / "run.py"), str(ROOT / "experiments" / "variance.py")
SWEEP = [
    "-m",
    "hydra/launcher=slurm_cpu",
    "baseline=otb,grpo",
    "group_size=4,8",
    f"seed={','.join(map(str, range(50)))}",
    "wait=false",
]
COMMANDS = {  # what -> words, exit code
    "run.py --help": ([RUN, "--help"], 0),
    "run.py --cfg job": ([RUN, "--cfg", "job"], 0),
    "run.py experiment=stability --cfg job": ([RUN, "experiment=stability", "--cfg", "job"], 0),
    "run.py, a choice that does not exist": ([RUN, "baseline=ottb"], 2),
    "run.py, a value out of range": ([RUN, "group_size=0"], 2),
    "variance.py, a refusal": ([VARIANCE, "estimators=rlo"], 2),
    "analysis.report --help": (["-m", "analysis.report", "--help"], 0),
    "a sweep of 200 runs, sent (sbatch answers at once)": ([RUN, *SWEEP], 0),
    "import otb": (["-c", "import otb"], 0),
    "import torch": (["-c", "import torch"], 0),
    "import all that a run needs": (["-c", "import experiments.running.train"], 0),
}
# In the place of SLURM: takes every job, has none in its queue.
STAND_INS = {"sbatch": "echo Submitted batch job 1", "squeue": "true", "scontrol": "true", "srun": "true"}


def measure(words: list[str], exit_code: int, folder: Path) -> tuple[float, float]:
    """-> seconds on the clock, seconds of the processor. Raises RuntimeError for another exit code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as runs:
        words = [RUN, f"runs_dir={runs}", *words[1:]] if words[0] == RUN else words
        before, started = os.times(), time.perf_counter()
        done = subprocess.run([sys.executable, *words], cwd=runs, env=environment, capture_output=True, text=True)
        seconds, after = time.perf_counter() - started, os.times()
    if done.returncode != exit_code:
        raise RuntimeError(f"{words} ended with {done.returncode}, not {exit_code}: {done.stderr[-500:]}")
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, processor


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"load of the machine before, 1 minute: {Path('/proc/loadavg').read_text().split()[0]}")
    print(f"{'':52}{'clock: best':>12}{'median':>9}{'processor: best':>17}{'median':>9}  (s, of {repeats})")
    with tempfile.TemporaryDirectory() as folder:
        for name, answer in STAND_INS.items():
            (Path(folder) / name).write_text(f"#!/bin/sh\n{answer}\n")
            (Path(folder) / name).chmod(0o755)
        for name, (words, exit_code) in COMMANDS.items():
            clock, processor = zip(*(measure(words, exit_code, Path(folder)) for _ in range(repeats)), strict=True)
            numbers = (min(clock), statistics.median(clock), min(processor), statistics.median(processor))
            print(f"{name:52}{numbers[0]:>12.2f}{numbers[1]:>9.2f}{numbers[2]:>17.2f}{numbers[3]:>9.2f}")


if __name__ == "__main__":
    main()
