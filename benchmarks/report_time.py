"""Time and memory to make the report of a sweep: `python benchmarks/report_time.py [RUNS=1000] [FOLDER]`.

The sweep has 10 arms, 4 group sizes and as many seeds as the runs allow. Its runs are those of tests/data/runs, of 80
steps, with other names, seeds and counts of tokens, so that no two runs share a point over tokens. The report is made
by the command in a process of its own: cold, and again after one run has changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
REAL_RUNS = sorted((ROOT / "tests" / "data" / "runs").iterdir())
ARMS = ["otb", "otb_carry", "otb_loo", "group_mean", "grpo", "rloo", "opo", "sequence_energy", "none", "energy_probe"]
SIZES = (4, 8, 16, 32)


def write_sweep(folder: Path, runs: int) -> None:
    """Writes `runs` run directories: seed by seed, every arm at every size."""
    shipped = {arm: yaml.safe_load((ROOT / "conf" / "baseline" / f"{arm}.yaml").read_text()) for arm in ARMS}
    for number in range(runs):
        original = REAL_RUNS[number % len(REAL_RUNS)]
        seed, cell = divmod(number, len(ARMS) * len(SIZES))
        arm, size = ARMS[cell // len(SIZES)], SIZES[cell % len(SIZES)]
        run = folder / f"{arm}-n{size}-seed{seed}"
        shutil.copytree(original, run)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config |= {"baseline": shipped[arm], "group_size": size, "seed": seed}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        for file in (run / "metrics.jsonl", run / "evaluations.jsonl"):
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            for row in rows:
                row["own_tokens_total"] = row["own_tokens_total"] * size // 4 + number
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(folder: Path) -> str:
    """Makes the report; returns seconds, those of processors, peak memory of one process, the page's size."""
    started = time.perf_counter()
    command = subprocess.Popen([sys.executable, "-m", "analysis.report", folder], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(command.pid, 0)
    assert status == 0, "the report was refused; the reason is above"
    page = (folder / "report" / "report.html").stat().st_size / 1e6
    seconds = time.perf_counter() - started
    processor = usage.ru_utime + usage.ru_stime
    return f"{seconds:.1f} s, processor {processor:.1f} s, peak {usage.ru_maxrss / 2**20:.2f} GiB, page {page:.1f} MB"


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[2] if len(sys.argv) > 2 else temporary) / "sweep"
        if not folder.exists():
            write_sweep(folder, runs)
        shutil.rmtree(folder / ".analysis", ignore_errors=True)
        print(f"{runs} runs, cold: {measure(folder)}")
        with open(next(folder.glob("*-seed0/metrics.jsonl")), "a") as file:
            file.write('{"step": 81, "accuracy": 0.5}\n')
        print(f"{runs} runs, one of them changed: {measure(folder)}")


if __name__ == "__main__":
    main()
