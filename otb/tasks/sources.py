"""Finds the rows of a data set in a local file, a local folder or the hub, and the files of each split.

otb/tasks/loading.py reads them. Every error is a ValueError that says what was looked for, what was found and what to
do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ONLY = "only"  # the single split of a data set, whatever its name
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SUFFIXES = ", ".join(BUILDERS)

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Source:
    """The place of a split's rows.

    path: file, folder or hub id; split: its name, or `only`; config, revision: the hub's; files: a pattern below a
    folder or hub id (`train/*`), for sets whose file names do not show their splits: the files then form one split.
    """

    path: str
    split: str
    config: str | None = None
    revision: str | None = None
    files: str | None = None

    @property
    def local(self) -> Path | None:
        """The file or folder, or None for a hub id. Raises ValueError for a path that does not exist."""
        path = Path(self.path).expanduser()
        if path.exists():
            return path
        # `data/gsm8k` looks like a hub id, but if a folder `data` exists it is a misspelt path.
        if _HUB_ID.fullmatch(self.path) and not ("/" in self.path and Path(path.parts[0]).is_dir()):
            return None
        raise ValueError(_missing_path(path))


def is_saved(local: Path) -> bool:
    """Returns whether `save_to_disk` wrote the folder."""
    return (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()


def files_of_split(source: Source, folder: Path) -> list[Path]:
    """Returns the data files of one split.

    They match `source.files`, or else, as in a plain local copy, are named like `train-00000-of-00002.parquet` and are
    in `folder`, its `data/` or its `config/`.
    """
    if matching := matching_files(source, folder):
        return matching
    folders = [folder / source.config] if source.config else []
    for place in [*folders, folder, folder / "data"]:
        splits: dict[str, list[Path]] = {}
        for file in sorted(place.glob("*")):
            if file.suffix in BUILDERS and not file.stem.startswith("dataset_info"):
                splits.setdefault(_SHARD.sub("", file.stem), []).append(file)
        if splits:
            files = splits[choose(source, sorted(splits))]
            if len({file.suffix for file in files}) > 1:
                names = ", ".join(file.name for file in files)
                raise ValueError(
                    f"path={source.path!r}: {names} all hold split {source.split!r}; choose one: task.path=FILE."
                )
            return files
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"path={source.path!r} is a folder without data files ({SUFFIXES}, here or in data/); it holds {names}. "
        f"Give the folder that holds them: task.path=FOLDER."
    )


def matching_files(source: Source, folder: Path) -> list[Path]:
    """Returns the data files that match `source.files`; [] without a pattern."""
    found = [] if source.files is None else sorted(folder.glob(source.files))
    return [file for file in found if file.suffix in BUILDERS]


def choose(source: Source, splits: Iterable[str]) -> str:
    """Returns the name of the source's split. Raises ValueError if it is not among `splits`."""
    splits = list(splits)
    if source.split == ONLY and len(splits) == 1:
        return splits[0]
    if source.split in splits:
        return source.split
    rule = "has no" if source.split != ONLY else "has several splits and so no"
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
        f"({SUFFIXES}), a local folder or a hub id such as openai/gsm8k."
    )
