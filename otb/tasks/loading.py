"""Loads a task's rows from a local file, a local folder or the hub, with `datasets.load_dataset`.

Every error is a ValueError that says what was looked for, what was found and what to do. A local path never touches the
network, and a hub id honours HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants

from otb.errors import first_line
from otb.files import sha256_of
from otb.tasks.sources import BUILDERS, SUFFIXES, Source, choose, files_of_split, is_saved, matching_files

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_rows(source: Source, columns: Iterable[str] = ()) -> Dataset:
    """Returns the rows of a source, unchanged.

    columns: names or dotted paths. If all files are parquet and have these columns, only they are read. This is faster,
    and in some data sets the other columns differ between files.

    Raises ValueError: no such path, split or file type, a hub id that is not cached, no rows.
    """
    folder, outer = _folder(source), [name.split(".")[0] for name in columns]
    rows = _hub_rows(source) if folder is None else _local_rows(source, folder, outer)
    if len(rows) == 0:
        raise ValueError(f"path={source.path!r}, split {source.split!r} holds no rows; a task needs at least one.")
    return rows


def provenance(source: Source, rows: Dataset) -> dict:
    """Returns path, config, split, revision, number of rows, and the `sha256` per local file or the hub's `commit`.

    The commit is None if `datasets` kept no record of it, as for rows from an offline cache.
    """
    facts = {"path": source.path, "config": source.config, "split": source.split, "revision": source.revision}
    folder = _folder(source)
    if folder is None:
        commits = set(re.findall(r"@([0-9a-f]{40})", " ".join(rows.info.download_checksums or {})))
        return facts | {"rows": len(rows), "commit": commits.pop() if len(commits) == 1 else None}
    if source.local is None:  # .../snapshots/COMMIT
        facts |= {"commit": folder.name if _COMMIT.fullmatch(folder.name) else None}
    if folder.is_file():
        files = [folder]
    elif is_saved(folder):
        files = sorted(file for file in folder.rglob("*") if file.is_file())
    else:
        files = files_of_split(source, folder)
    name = {file: str(file.relative_to(folder)) if folder.is_dir() else file.name for file in files}
    return facts | {"rows": len(rows), "sha256": {name[file]: sha256_of(file) for file in files}}


def _folder(source: Source) -> Path | None:
    """Returns the local file or folder to read: a hub id with `files` is in the hub's cache, any other gives None."""
    if source.local is not None or source.files is None:
        return source.local
    try:
        folder = _fetched_files(source)
    except (OSError, ValueError) as error:
        raise ValueError(_not_from_the_hub(source, error)) from error
    if not matching_files(source, folder):
        raise ValueError(
            f"path={source.path!r} has no data files ({SUFFIXES}) in the cache that match files={source.files!r}. "
            "Run experiments/prefetch.py, or correct task.files."
        )
    return folder


def _hub_rows(source: Source) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        splits = load_dataset(source.path, source.config, revision=source.revision)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(_not_from_the_hub(source, error)) from error
    return splits[choose(source, splits)]


def _local_rows(source: Source, local: Path, columns: list[str]) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    if is_saved(local):
        # In memory, because `datasets` would cache derived rows in the set's own folder, which may be read-only.
        saved: Dataset | DatasetDict = load_from_disk(str(local), keep_in_memory=True)
        return saved[choose(source, saved)] if isinstance(saved, DatasetDict) else saved
    files = [local] if local.is_file() else files_of_split(source, local)
    builder = BUILDERS.get(files[0].suffix)
    if builder is None:
        raise ValueError(f"path={source.path!r} is a {files[0].suffix or 'file without suffix'}; readable: {SUFFIXES}.")
    if all(file.stat().st_size == 0 for file in files):
        raise ValueError(f"path={source.path!r}: {files[0].name} is empty; a task needs at least one row.")
    try:
        some = {"columns": columns} if builder == "parquet" and _have(files, columns) else {}
        return load_dataset(builder, data_files={"rows": [str(file) for file in files]}, split="rows", **some)
    except Exception as error:  # datasets raises its own, pyarrow's and pandas' errors for a file it cannot read
        raise ValueError(
            f"path={source.path!r}: {files[0].name} holds no row that can be read as {builder} "
            f"({type(error).__name__}: {first_line(error)[:200]}). Check that the file is complete and has that format."
        ) from error


def _have(files: list[Path], columns: list[str]) -> bool:
    """Returns whether `columns` is not empty and every parquet file has all of them."""
    from pyarrow.parquet import read_schema

    return bool(columns) and all(set(columns) <= set(read_schema(file).names) for file in files)


# ---- the hub


def refuse_absent(source: Source, offline: bool = True) -> None:
    """Raises ValueError for a path that does not exist, and with HF_HUB_OFFLINE for a hub id that is not in the cache.

    Reads no rows. offline: False to ignore HF_HUB_OFFLINE, because the rows are for another machine.
    """
    if source.local is None and offline and constants.HF_HUB_OFFLINE and not _may_be_cached(source):
        raise ValueError(_not_from_the_hub(source))


def _may_be_cached(source: Source) -> bool:
    """Returns whether a cache holds any revision of a hub id; only reading the rows shows if it is the right one."""
    if source.files is not None:
        folder = Path(constants.HF_HUB_CACHE) / f"datasets--{source.path.replace('/', '--')}"
        return any(folder.glob("snapshots/*"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets").expanduser()
    folders = [folder for folder in prepared.glob("*") if _letters(folder.name) == _letters(source.path)]
    return any(any(folder.glob("*/*/*")) for folder in folders)


def fetch_rows(source: Source) -> str:
    """Downloads the rows of a hub id, either all its splits or its `files`, and returns a line that lists them.

    Raises the errors of the hub's libraries, and ValueError if no file matches.
    """
    folder = _folder(source)
    if folder is not None:
        names = [str(file.relative_to(folder)) for file in matching_files(source, folder)]
        return f"data set {source.path}: " + ", ".join(names)
    from datasets import load_dataset

    splits = load_dataset(source.path, source.config, revision=source.revision)
    return f"data set {source.path}: " + ", ".join(f"{name} {len(rows)} rows" for name, rows in splits.items())


def _fetched_files(source: Source) -> Path:
    """Returns the cache folder with the source's files, after downloading them unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download

    patterns = [source.files or "*"]
    return Path(snapshot_download(source.path, repo_type="dataset", revision=source.revision, allow_patterns=patterns))


def _letters(name: str) -> str:
    """Returns a form that a hub id shares with its folder: `datasets` turns OWNER/MySet into OWNER___my_set."""
    return re.sub("[_/]", "", name).lower()


def _not_from_the_hub(source: Source, error: Exception | None = None) -> str:
    """Returns the text of the error for a hub id that could not be read."""
    options = {"dataset": source.path, "config": source.config, "revision": source.revision, "files": source.files}
    arguments = " ".join(f"--{name} {value}" for name, value in options.items() if value)
    why = "HF_HUB_OFFLINE is set and it is not in the cache" if constants.HF_HUB_OFFLINE else "the hub refused it"
    return (
        f"path={source.path!r} is not a local file or folder, and it could not be read as a hub id: {why}"
        + ("" if error is None else f" ({type(error).__name__}: {first_line(error)[:200]})")
        + f". Run `python experiments/prefetch.py {arguments}` with network access (same HF_HOME), or give a local "
        "folder: task.path=FOLDER." + (" For another hub id, also set task.revision=null." if source.revision else "")
    )
