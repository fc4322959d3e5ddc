"""Writes files that are whole or absent, whatever happens meanwhile. It imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from otb.errors import unwritable


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` to write to; that file takes the place of `path` when the block ends.

    Its bytes are on the disk before it does. An error of the block, or OSError from the file system, is raised and
    leaves `path` as it was.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        sync_file(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder itself may be what cannot be written
            aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path` to write into; it becomes `path`, which must not exist, when the block ends.

    Its files are on the disk before it does. A killed call leaves `path` absent; the next one clears what it wrote.
    """
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    sync_tree(partial)
    partial.rename(path)


def sync_file(path: Path) -> None:
    """Waits until a file or a directory is on the disk (fsync). Does nothing where it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Waits until every file below a directory and the directories themselves are on the disk."""
    for folder, _, names in os.walk(directory):
        for path in [*(os.path.join(folder, name) for name in names), folder]:
            sync_file(Path(path))


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Replaces the text of a file, which holds the old text or the new one whatever happens. Raises RunError."""
    try:
        with whole(path) as aside:
            aside.write_text(text, encoding="utf8")
    except OSError as error:
        raise unwritable(path, error) from error


def write_once(path: Path, text: str) -> None:
    """Writes a file where there is none: of several processes that do, on any host, the first one's text stays.

    Raises RunError.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            aside.write_text(text, encoding="utf8")
            sync_file(aside)
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)  # creates the whole file or fails, on network file systems too
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
