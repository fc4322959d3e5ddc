"""python -m analysis.rollouts RUN [RUN ...]: writes one page on which the kept rollouts of runs are looked at.

Token by token, with advantage, baseline, energy, score norm and probability. The page opens from disk and asks nothing
of a network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from otb.errors import REFUSED, RunError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for what is refused."""
    parser = argparse.ArgumentParser(prog="python -m analysis.rollouts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory, or a folder of them")
    parser.add_argument("--out", type=Path, help="the page; default: rollouts.html in RUN, or here for several")
    parser.add_argument("--steps", help="only these of the kept steps, comma-separated, such as 40,80")
    options = parser.parse_args(arguments)
    try:
        page, told = make_page(options.runs, options.out, options.steps)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(told, f"page: {page} ({page.stat().st_size / 1e6:,.1f} MB)", sep="\n")
    return 0


def make_page(folders: list[Path], out: Path | None = None, steps: str | None = None) -> tuple[Path, str]:
    """Writes the page.

    Args:
        folders: run directories, or folders of them.
        out: the page; None for rollouts.html in the only folder, or in the working directory.
        steps: comma-separated; None for all that were kept.

    Returns:
        Its path, and what it shows, in words.

    Raises:
        RunError: nothing can be shown.
    """
    try:
        chosen = None if steps is None else [int(step) for step in steps.split(",")]
    except ValueError as error:
        raise RunError(f"--steps={steps} is no list of steps. Write whole numbers and commas: 40,80.") from error
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise RunError(f"{missing[0]} is not a folder. Give run directories: runs/TASK-MODEL/RUN.")

    from analysis.rollouts.collect import collect
    from analysis.rollouts.page import write_page

    collection = collect(folders, chosen)
    name = folders[0].resolve().name if len(folders) == 1 else f"{len(collection.runs)} runs"
    home = folders[0] if len(folders) == 1 else Path()
    page = write_page(collection, f"Rollouts of {name}", out or home / "rollouts.html")
    counts = {"run": len(collection.runs), "prompt group": len(collection.groups), "token": collection.tokens}
    told = ", ".join(f"{count:,} {word}{'s' if count != 1 else ''}" for word, count in counts.items())
    return page, "\n".join([told, *collection.notes])


if __name__ == "__main__":
    sys.exit(main())
