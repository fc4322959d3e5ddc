"""Defines the error that is shown without a traceback, and the exit codes of every command. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

CRASHED = 1  # a bug, with its traceback; in a sweep, a run that failed
REFUSED = 2  # the request cannot be carried out; one message says why and what to do
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a signal stopped the run; the same command resumes from the checkpoint
STOPPED_FROM_KEYBOARD = 130  # 128 + SIGINT, as shells have it

NOT_CACHED = "it is not in the cache and HF_HUB_OFFLINE is set"


class RunError(Exception):
    """A problem that the user can fix. Its text says the value, the rule and the fix."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unwritable(path: Path, error: Exception) -> RunError:
    """Returns the error to show for a file or folder that the operating system or a library could not write."""
    reason = getattr(error, "strerror", None) or first_line(error)
    if "inline_container" in reason:  # torch.save, which does not say why
        reason = "only part of the file fitted"
    return RunError(
        f"{path} cannot be written: {reason}. Every file must reach the disk: free space or fix its permissions, then "
        "run the same command again, or choose another runs_dir."
    )


def not_from_the_hub(name: str, revision: str | None, why: str) -> RunError:
    """Returns the error to show for a model that is not a folder and cannot be had from the hub."""
    fetch = f"python experiments/prefetch.py --model {name}" + (f" --revision {revision}" if revision else "")
    return RunError(
        f"model.name={name} is not a folder and cannot be had from the hub: {why}. With network access, run: {fetch}"
    )


def no_model(folder: str, reason: str) -> RunError:
    """Returns the error to show for a folder that transformers cannot read a model from."""
    return RunError(
        f"model.name={folder} cannot be read as a transformers model: {reason}. The folder must hold the files that "
        "save_pretrained writes for the model and its tokenizer."
    )
