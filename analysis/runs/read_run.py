"""Reads one run directory, or one plain TRL run, into rows and facts. Called by load.py, once per changed run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from analysis.runs.read_trl import read_trl_run, trainer_state
from analysis.runs.rows import RunRecord, flat_cells, read_lines, read_mapping, read_metrics, yaml_mapping
from otb.records import RunDirectory

STAMPED = ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "status.json", "environment.json", "trainer_state.json")
MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}$")  # overwrite=true leaves the old run under such a name
LIBRARIES = ("torch", "transformers", "trl", "vllm")  # whose versions decide which runs are compared
NOT_FINITE = re.compile(r"\b(loss|gradient_norm)=-?(nan|inf)")


def find_runs(folder: Path) -> list[Path]:
    """Lists run directories and TRL output folders in `folder`, itself included; nothing below a run is looked at.

    The folder of a sweep holds no runs but a file per run that names its directory: these are listed.
    """
    if (named := runs_of_sweep(folder)) is not None:
        return named
    runs = []
    for parent, names, files in os.walk(folder):
        path = Path(parent)
        if "metrics.jsonl" in files or {"config.yaml", "status.json"} <= set(files) or trainer_state(path):
            runs.append(path)
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))
    return runs


def runs_of_sweep(folder: Path) -> list[Path] | None:
    """Lists the run directories that the job files of a sweep name and that exist; None where there are no job files.

    Where the folder of all runs was moved or copied, they are looked for beside the sweep as before.
    """
    files = sorted(folder.glob("job-*.json"))
    if not files:
        return None
    named = [Path(json.loads(file.read_text(encoding="utf8"))["run"]) for file in files]
    places = [run if run.exists() else folder.absolute().parent / run.parent.name / run.name for run in named]
    return [place for place in places if (place / "status.json").exists()]


def fingerprint(path: Path) -> str:
    """Returns sizes and modification times, a text that changes whenever a file that is read here changes."""
    marks = []
    state = None if (path / "metrics.jsonl").exists() else trainer_state(path)
    for file in [path / name for name in STAMPED] if state is None else [state]:
        try:
            facts = os.stat(file)
            marks.append(f"{facts.st_size}.{facts.st_mtime_ns}")
        except FileNotFoundError:
            marks.append("-")
    return "/".join(marks)


def read_run(path: Path, name: str) -> RunRecord:
    """Reads a run. name: what it is called in every table, its path below the folder that was loaded."""
    if not (path / "metrics.jsonl").exists() and (state := trainer_state(path)):
        return read_trl_run(state, name)
    directory = RunDirectory(path)
    warnings: list[str] = []
    config = read_mapping(directory.config_file, yaml_mapping, warnings)
    environment = read_mapping(directory.environment_file, json.loads, warnings)
    status = read_mapping(directory.status_file, json.loads, warnings)
    steps, damaged = read_metrics(directory.metrics_file)
    evaluations, damaged_evaluations = read_lines(directory.evaluations_file)
    for file, count in ((directory.metrics_file, damaged), (directory.evaluations_file, damaged_evaluations)):
        if count:
            warnings.append(f"{file}: {count} damaged line{'s' if count > 1 else ''} skipped")
    for file_name, content in (("config.yaml", config), ("status.json", status)):
        if not content:
            warnings.append(f"{path}: no readable {file_name}; the run is marked and left out of figures")
    evaluations = evaluations.rename_columns(
        [column if column == "step" else f"evaluation_{column}" for column in evaluations.column_names]
    )
    versions = environment.get("versions", {})
    libraries = [f"{library} {versions[library]}" for library in LIBRARIES if library in versions]
    facts = {
        "run": name,
        "kind": "otb",
        "outcome": outcome(path, status, config),
        "error": status.get("error"),
        "last_step": int(steps["step"][-1].as_py()) if len(steps) else 0,
        "version": str(versions.get("otb", "unknown")),
        "libraries": ", ".join(libraries) if "versions" in environment else "unknown",
        "commit": (str(environment.get("commit") or "unknown")[:9] + ("+" if environment.get("diff_sha256") else "")),
        "device": ", ".join(sorted(set(environment.get("devices") or ["unknown"]))),
        "damaged_lines": damaged + damaged_evaluations,
    }
    return RunRecord(facts | flat_cells(config), steps, evaluations, warnings)


def outcome(path: Path, status: dict, config: dict) -> str:
    """Returns finished, diverged (stopped as loss or gradient was not finite: a result), moved aside or unfinished."""
    if MOVED_ASIDE.search(path.name):
        return "moved aside"
    if not status or not config:
        return "unfinished"
    if status.get("state") == "finished":
        return "finished"
    if status.get("state") == "failed" and NOT_FINITE.search(str(status.get("error"))):
        return "diverged"
    return "unfinished"
