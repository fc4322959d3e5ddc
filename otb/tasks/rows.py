"""Loads the rows of a data set from a local file, a local folder or the hub, by `datasets.load_dataset`. For tasks.

Every error is a ValueError that says what was looked for, what is there and what to do; a local path never touches the
network, and a hub id honours HF_HUB_OFFLINE.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from otb.errors import first_line
from otb.files import sha256_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

ONLY = "only"  # names the one split of a data set that has no other, whatever it is called
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Source:
    """Where rows lie. path: file, folder or hub id; split: its name, or `only`; config, revision: of the hub."""

    path: str
    split: str
    config: str | None = None
    revision: str | None = None

    @property
    def local(self) -> Path | None:
        """The file or folder, or None for a hub id. Raises ValueError for a path that does not exist."""
        path = Path(self.path).expanduser()
        if path.exists():
            return path
        # `data/gsm8k` is spelled like a hub id; beside a folder `data` it is a path with a mistake.
        if _HUB_ID.fullmatch(self.path) and not ("/" in self.path and Path(path.parts[0]).is_dir()):
            return None
        raise ValueError(_missing_path(path))


def load_rows(source: Source) -> Dataset:
    """Returns the rows of a source as they are.

    Raises ValueError: no such path, split or file type, a hub id that is not cached, no rows.
    """
    local = source.local
    rows = _hub_rows(source) if local is None else _local_rows(source, local)
    if len(rows) == 0:
        raise ValueError(f"path={source.path!r}, split {source.split!r} holds no rows; a task needs at least one.")
    return rows


def provenance(source: Source, rows: Dataset) -> dict:
    """Returns what was read: path, config, split, revision, number of rows, `sha256` per local file or hub's `commit`.

    The commit is None where `datasets` kept no record of it, as for rows served from an offline cache.
    """
    facts = {"path": source.path, "config": source.config, "split": source.split, "revision": source.revision}
    local = source.local
    if local is None:
        commits = set(re.findall(r"@([0-9a-f]{40})", " ".join(rows.info.download_checksums or {})))
        return facts | {"rows": len(rows), "commit": commits.pop() if len(commits) == 1 else None}
    if local.is_file():
        files = [local]
    elif _is_saved(local):
        files = sorted(file for file in local.rglob("*") if file.is_file())
    else:
        files = _files_of_split(source, local)
    name = {file: str(file.relative_to(local)) if local.is_dir() else file.name for file in files}
    return facts | {"rows": len(rows), "sha256": {name[file]: sha256_of(file) for file in files}}


def _hub_rows(source: Source) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants

    try:
        splits = load_dataset(source.path, source.config, revision=source.revision)
    except (OSError, ValueError, DatasetsError) as error:
        arguments = f"--dataset {source.path}"
        arguments += f" --config {source.config}" if source.config else ""
        arguments += f" --revision {source.revision}" if source.revision else ""
        why = (
            "HF_HUB_OFFLINE is set and it is not in the cache"
            if constants.HF_HUB_OFFLINE
            else "the hub did not give it"
        )
        raise ValueError(
            f"path={source.path!r} is no local file or folder, and as a hub id it could not be read: {why} "
            f"({type(error).__name__}: {first_line(error)[:200]}). "
            f"Run `python -m otb.prefetch {arguments}` where there is network (same HF_HOME), or give a local folder: "
            "task.path=FOLDER."
        ) from error
    return splits[_choose(source, list(splits))]


def _local_rows(source: Source, local: Path) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk

    if _is_saved(local):
        # In memory, because a saved set's derived rows would be cached in its own folder, which may be read-only.
        saved: Dataset | DatasetDict = load_from_disk(str(local), keep_in_memory=True)
        return saved[_choose(source, list(saved))] if isinstance(saved, DatasetDict) else saved
    files = [local] if local.is_file() else _files_of_split(source, local)
    builder = BUILDERS.get(files[0].suffix)
    if builder is None:
        raise ValueError(
            f"path={source.path!r} is a {files[0].suffix or 'file without suffix'}; readable: {_suffixes()}."
        )
    if all(file.stat().st_size == 0 for file in files):
        raise ValueError(f"path={source.path!r}: {files[0].name} is empty; a task needs at least one row.")
    try:
        return load_dataset(builder, data_files={"rows": [str(file) for file in files]}, split="rows")
    except Exception as error:  # datasets raises its own, pyarrow's and pandas' errors for a file it cannot read
        raise ValueError(
            f"path={source.path!r}: {files[0].name} holds no row that can be read as {builder} "
            f"({type(error).__name__}: {first_line(error)[:200]}). Check that the file is complete and of that format."
        ) from error


def _is_saved(local: Path) -> bool:
    """Tells whether `save_to_disk` wrote the folder."""
    return (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()


def _files_of_split(source: Source, folder: Path) -> list[Path]:
    """Returns the data files of one split, such as `train-00000-of-00002.parquet`: here, in `data/` or in `config/`."""
    folders = [folder / source.config] if source.config else []
    for place in [*folders, folder, folder / "data"]:
        splits: dict[str, list[Path]] = {}
        for file in sorted(place.glob("*")):
            if file.suffix in BUILDERS and not file.stem.startswith("dataset_info"):
                splits.setdefault(_SHARD.sub("", file.stem), []).append(file)
        if splits:
            files = splits[_choose(source, sorted(splits))]
            if len({file.suffix for file in files}) > 1:
                names = ", ".join(file.name for file in files)
                raise ValueError(
                    f"path={source.path!r}: {names} all hold split {source.split!r}; name one: task.path=FILE."
                )
            return files
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"path={source.path!r} is a folder without data files ({_suffixes()}, here or in data/); it holds {names}. "
        f"Give the folder that holds them: task.path=FOLDER."
    )


def _choose(source: Source, splits: list[str]) -> str:
    """Returns the name of the source's split among those that there are. Raises ValueError."""
    if source.split == ONLY and len(splits) == 1:
        return splits[0]
    if source.split in splits:
        return source.split
    rule = "has no" if source.split != ONLY else "has several splits, so none is the"
    raise ValueError(
        f"path={source.path!r} {rule} split {source.split!r}; found: {', '.join(splits)}. Name one of them."
    )


def _missing_path(path: Path) -> str:
    """Returns the text of the error for a path that does not exist."""
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    missing = path.absolute().relative_to(parent).parts[0]
    near = difflib.get_close_matches(missing, [entry.name for entry in parent.iterdir()], n=3)
    hint = f"Did you mean {' or '.join(str(parent / name) for name in near)}?" if near else "Check the spelling."
    return (
        f"path={str(path)!r} does not exist: there is no {missing!r} in {parent}. {hint} A path is a local file "
        f"({_suffixes()}), a local folder or a hub id such as openai/gsm8k."
    )


def _suffixes() -> str:
    return ", ".join(BUILDERS)
