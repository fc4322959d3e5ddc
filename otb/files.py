"""Writes files that are either complete or absent, even after a crash. It imports no torch."""

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
    """Yields a temporary path to write to; when the block ends, that file is flushed to disk and replaces `path`.

    Errors of the block and OSError from the file system are raised, and leave `path` as it was.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        sync_file(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder itself may be unwritable
            aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder to write into; when the block ends, it is flushed to disk and renamed to `path`.

    `path` must not exist. A killed call leaves it absent, and the next call clears the files that were left over.
    """
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    sync_tree(partial)
    partial.rename(path)


def sync_file(path: Path) -> None:
    """Waits until a file or a directory is on the disk (fsync). Does nothing if it does not exist."""
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
    """Replaces the text of a file; after a crash it holds either the old text or the new one. Raises RunError."""
    try:
        with whole(path) as aside:
            aside.write_text(text, encoding="utf8")
    except OSError as error:
        raise unwritable(path, error) from error


def write_once(path: Path, text: str) -> None:
    """Writes a file unless it exists; if several processes on any hosts race, the first one's text stays.

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
