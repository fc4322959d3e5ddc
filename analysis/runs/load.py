"""Loads a folder of runs as two tables: one row per run, one row per run and step. Cached and incremental.

`load(folder)` returns `Runs`. What is damaged is skipped and named in `warnings`; what must not be compared
has the reason in the column `left_out` of the table of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.runs.marks import describe_runs
from analysis.runs.read_run import find_runs, fingerprint, read_run, runs_of_sweep
from analysis.runs.rows import RunRecord
from otb.errors import RunError
from otb.records import RunDirectory

CACHE_VERSION = 1  # raise it when what is read, or its form, changes
SHARED = ("arm", "baseline", "setting", "kind", "outcome")  # columns of runs in steps, beside group_size and seed


@dataclass(frozen=True)
class Runs:
    """The tables of a folder of runs.

    Attributes:
        folder: what was loaded.
        runs: one row per run: facts, marks, every configuration key under its full name (`trainer.loss_type`).
        steps: one row per run and step: metrics, evaluations joined as evaluation_*, and of `runs` the columns
            group_size, seed and `SHARED`. Step 0 is the evaluation before training.
        warnings: what was skipped or cannot be compared, each naming its file or run.
        paths: name of a run -> its directory.
    """

    folder: Path
    runs: pd.DataFrame
    steps: pd.DataFrame
    warnings: tuple[str, ...]
    paths: dict[str, Path]

    @property
    def used(self) -> pd.DataFrame:
        """Returns the rows of `steps` that may stand in one figure: no run that is left out, no outside run."""
        kept = self.runs.loc[(self.runs.left_out == "") & (self.runs.kind == "otb"), "run"]
        return self.of(kept)

    @property
    def outside(self) -> pd.DataFrame:
        """Returns the rows of plain TRL runs."""
        return self.of(self.runs.loc[self.runs.kind == "trl", "run"])

    def directory(self, run: str) -> Path:
        """Returns where a run of the table lies."""
        return self.paths[run]

    def of(self, runs) -> pd.DataFrame:
        """Returns the rows of `steps` of the runs with these names."""
        return self.steps[self.steps.run.isin(list(runs))]


def load(folder: str | Path, include: tuple[str, ...] = (), cache: bool = True) -> Runs:
    """Loads every run below `folder`.

    Args:
        folder: of runs, of a sweep, or a single run.
        include: kinds of marked runs to use all the same: "unfinished", "versions", "lengths".
        cache: keep what was read in `folder`/.analysis; only runs whose files changed are read again.

    Raises:
        RunError: the folder is missing or holds no run.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Give a folder of runs, such as runs/arithmetic-tiny.")
    paths = {run_name(path, folder): path for path in find_runs(folder)}
    if not paths and runs_of_sweep(folder) is not None:
        raise RunError(f"{folder} is a sweep, and none of its runs has begun: python -m slurm.status {folder}")
    if not paths:
        raise RunError(
            f"{folder} holds no run: no metrics.jsonl and no trainer_state.json below it. "
            f"Make some: python experiments/run.py -m runs_dir={folder} baseline=otb,grpo seed=0,1,2"
        )
    facts, steps = read_all(folder, paths, cache)
    for fact in facts:
        if fact["outcome"] == "unfinished":  # asked anew: a process may die without changing a file
            fact["outcome"] = RunDirectory(paths[fact["run"]]).state() or "unfinished"
    warnings = [warning for fact in facts for warning in fact["warnings"]]
    bookkeeping = ("warnings", "fingerprint")
    facts = [{key: value for key, value in fact.items() if key not in bookkeeping} for fact in facts]
    runs, marks = describe_runs(facts, include)
    return Runs(folder, runs, with_shared_columns(steps, runs), (*warnings, *marks), paths)


def run_name(path: Path, folder: Path) -> str:
    """Returns the name of a run in every table: its path below the folder, or below the folder that holds the sweep."""
    if path == folder:
        return folder.resolve().name
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    beside = folder.absolute().parent
    return (path.relative_to(beside) if path.is_relative_to(beside) else path).as_posix()


def read_all(folder: Path, paths: dict[str, Path], cache: bool) -> tuple[list[dict], pa.Table]:
    """Returns (facts per run, by name; their joined rows). Reads only the runs that the cache does not hold."""
    known, cached = read_cache(folder) if cache else ({}, None)
    prints = {name: fingerprint(path) for name, path in paths.items()}
    current = [name for name in paths if known.get(name, {}).get("fingerprint") == prints[name]]
    stale = [name for name in paths if name not in set(current)]
    if not stale and len(current) == len(known):
        return [known[name] for name in sorted(known)], cached
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:  # Arrow's parser frees the interpreter
        records = list(pool.map(lambda name: read_run(paths[name], name), stale))
    facts = {name: known[name] for name in current}
    for name, record in zip(stale, records, strict=True):
        facts[name] = record.facts | {"warnings": record.warnings, "fingerprint": prints[name]}
    order = sorted(facts)
    tables = [] if cached is None else [cached.filter(pc.is_in(cached["run"], pa.array(current, pa.string())))]
    tables += [joined(record, name) for name, record in zip(stale, records, strict=True)]
    del records
    steps = pa.concat_tables(tables, promote_options="default").combine_chunks()
    if cache:
        write_cache(folder, [facts[name] for name in order], steps)
    return [facts[name] for name in order], steps


def joined(record: RunRecord, name: str) -> pa.Table:
    """Joins metrics and evaluations of a run, sorted by step; the last of two rows of one step counts."""
    steps, evaluations = record.steps, record.evaluations
    if len(evaluations) and len(steps):
        steps = steps.join(evaluations, "step", join_type="full outer")
    elif len(evaluations):
        steps = evaluations
    order = np.argsort(steps["step"].to_numpy(), kind="stable")
    numbers = steps["step"].to_numpy()[order]
    last = np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]
    steps = steps.take(pa.array(order[last]))
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(steps), np.int32)), pa.array([name]))
    return steps.append_column("run", names.cast(pa.string()).dictionary_encode())


def with_shared_columns(steps: pa.Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Adds the columns that every figure selects by, as categories: a byte or four per row."""
    frame = steps.unify_dictionaries().to_pandas(split_blocks=True)
    frame["run"] = frame["run"].cat.set_categories(runs.run)
    codes = frame["run"].cat.codes.to_numpy()
    for column in ("group_size", "seed"):
        frame[column] = runs[column].to_numpy(np.float32)[codes]
    for column in SHARED:
        values = pd.Categorical(runs[column])
        frame[column] = pd.Categorical.from_codes(values.codes[codes], values.categories)
    frame["step"] = frame["step"].astype(np.int64)
    if not (np.diff(codes) >= 0).all():
        frame = frame.iloc[np.argsort(codes, kind="stable")].reset_index(drop=True)
    return frame


# ---- the cache: facts.json and steps.parquet, written aside and renamed


def read_cache(folder: Path) -> tuple[dict[str, dict], pa.Table | None]:
    """Returns (facts per run, their rows); ({}, None) where there is no whole cache of this version."""
    try:
        stored = json.loads((folder / ".analysis" / "facts.json").read_text(encoding="utf8"))
        if stored["cache_version"] != CACHE_VERSION:
            return {}, None
        steps = pq.read_table(folder / ".analysis" / stored["steps"], read_dictionary=["run"])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return {}, None
    return {fact["run"]: fact for fact in stored["facts"]}, steps


def write_cache(folder: Path, facts: list[dict], steps: pa.Table) -> None:
    """Writes the cache; a folder that cannot be written is read anew each time. No reader sees a torn pair of files."""
    home = folder / ".analysis"
    with contextlib.suppress(OSError):
        home.mkdir(exist_ok=True)
        name = f"steps-{os.getpid()}-{os.urandom(3).hex()}.parquet"
        pq.write_table(steps, home / name, compression="lz4", use_dictionary=["run"])
        text = json.dumps({"cache_version": CACHE_VERSION, "steps": name, "facts": facts}, default=str)
        aside = home / f"{name}.json"
        aside.write_text(text, encoding="utf8")
        os.replace(aside, home / "facts.json")
        for old in home.glob("steps-*.parquet"):
            if old.name != name:
                old.unlink(missing_ok=True)
