"""python -m analysis.excerpt SRC DST: makes a small copy of finished runs, without checkpoints or traces of a machine.

Made for tests/data/runs: what analysis reads, numbers to six digits, nothing that names a host, a user or a path.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from analysis.runs.read_run import find_runs
from otb.errors import RunError
from otb.records import RunDirectory, sample_step

KEPT = ("python", "versions", "commit", "diff_sha256", "cpus", "threads", "devices", "processes")
LONG_NUMBER = re.compile(r"(?<=[ :\[])-?\d+\.\d{5,}(e[+-]?\d+)?")
PATH = re.compile(r"""(?<![\w/.])(~|/)[\w.~+@-]*(/[\w.+@=,-]+)*/?""")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for what is refused."""
    parser = argparse.ArgumentParser(prog="python -m analysis.excerpt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="folder of runs")
    parser.add_argument("destination", type=Path, help="folder that the small copies go to; must not exist")
    parser.add_argument("--pick", default=".", help="regular expression that a run's path must match")
    parser.add_argument("--samples", type=int, default=1, help="prompt groups kept per run, of its last samples")
    options = parser.parse_args(arguments)
    try:
        runs = excerpt(options.source, options.destination, options.pick, options.samples)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in options.destination.rglob("*") if file.is_file())
    print(f"{len(runs)} runs, {size / 1000:,.0f} kB in {options.destination}")
    return 0


def excerpt(source: Path, destination: Path, pick: str = ".", groups: int = 1) -> list[Path]:
    """Copies every finished or diverged run whose path matches.

    Args:
        source: folder of runs.
        destination: folder of the copies, which must not exist.
        pick: regular expression for a run's path below `source`.
        groups: prompt groups kept of a run's last samples.

    Returns:
        The copies.

    Raises:
        RunError: the destination exists, or no run matches.
    """
    if destination.exists():
        raise RunError(f"{destination} exists; an excerpt is made anew. Remove it or choose another folder.")
    states = ("finished", "failed")
    runs = [run for run in find_runs(source) if RunDirectory(run).status().get("state") in states]
    runs = [run for run in runs if re.search(pick, run.relative_to(source).as_posix())]
    if not runs:
        raise RunError(f"{source} holds no finished run that matches {pick!r}. `python -m analysis.report` lists them.")
    copies = [destination / run.relative_to(source) for run in runs]
    for run, copy in zip(runs, copies, strict=True):
        copy_run(RunDirectory(run), RunDirectory(copy), groups)
    return copies


def copy_run(run: RunDirectory, copy: RunDirectory, groups: int) -> None:
    """Copies one run. groups: prompt groups kept of its last samples."""
    copy.rollouts.mkdir(parents=True)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if (run.path / name).exists():
            text = (run.path / name).read_text(encoding="utf8")
            (copy.path / name).write_text(LONG_NUMBER.sub(shorter, text), encoding="utf8")
    copy.config_file.write_text(without_paths(run.config_file.read_text(encoding="utf8")), encoding="utf8")
    copy.status_file.write_text(without_paths(run.status_file.read_text(encoding="utf8")), encoding="utf8")
    if run.environment_file.exists():
        facts = json.loads(run.environment_file.read_text(encoding="utf8"))
        kept = {name: facts[name] for name in KEPT if name in facts}
        copy.environment_file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf8")
    samples = sorted(run.rollouts.glob("step-*.parquet"), key=sample_step)
    if samples:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        table = pq.read_table(samples[-1])
        first = table.filter(pc.less(table["prompt"], groups)).replace_schema_metadata(None)
        pq.write_table(first, copy.rollouts / samples[-1].name, compression="zstd")


def shorter(number: re.Match) -> str:
    """Returns a number with six significant digits: half the size, and more than any figure shows."""
    return f"{float(number.group()):.6g}"


def without_paths(text: str) -> str:
    """Cuts absolute and home paths to their last part."""
    return PATH.sub(lambda path: path.group().rstrip("/").rsplit("/", 1)[-1] or "runs", text)


if __name__ == "__main__":
    sys.exit(main())
