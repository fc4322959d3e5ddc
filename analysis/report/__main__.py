"""python -m analysis.report FOLDER: makes every table and figure of a folder of runs, as report.md and .html.

The claims C1-C5 with effects, intervals and verdicts; figures as PDF, PNG and CSV; one self-contained page that opens
from disk. Several settings in one folder get a part each; what is left out is listed with the reason.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otb.errors import RunError

if TYPE_CHECKING:
    from analysis.report.drawing import Drawings


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for what is refused."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of run directories; plain TRL output folders count too")
    parser.add_argument("--out", type=Path, help="where the report goes; default: report/ in the folder of runs")
    parser.add_argument("--target", type=float, help="accuracy of the token comparison; default: from the runs")
    parser.add_argument(
        "--include",
        default="",
        help="marked runs to use all the same: unfinished,versions,lengths (comma-separated)",
    )
    parser.add_argument("--no-cache", action="store_true", help="read every run anew and keep no cache")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="look at the runs every 10 s (or SECONDS) and renew the report, and the open page, where one has changed",
    )
    options = parser.parse_args(arguments)
    try:
        kinds = tuple(filter(None, options.include.split(",")))
        chosen = (options.runs, options.out, options.target, kinds, not options.no_cache)
        if options.watch is not None:
            return watch_report(options.watch, *chosen)
        page = make_report(*chosen)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {page}\n        {page.with_suffix('.md')}\nfigures: {page.parent / 'figures'}")
    return 0


def make_report(
    folder: Path,
    out: Path | None = None,
    target: float | None = None,
    include: tuple[str, ...] = (),
    cache: bool = True,
    drawings: Drawings | None = None,
    watched: float | None = None,
) -> Path:
    """Writes report.html, report.md and figures/.

    Args:
        folder: run directories, and plain TRL output folders.
        out: where the report goes; None for report/ in the folder.
        target: accuracy of the token comparison; None for one from the runs.
        include, cache: as in `load`.
        drawings: what was drawn before, of a report that is watched.
        watched: seconds between two looks at the runs; the page renews itself. None for a page that stays.

    Returns:
        The path of report.html.

    Raises:
        RunError: nothing can be drawn.
    """
    from analysis.report.drawing import Drawings
    from analysis.report.page import write_pages
    from analysis.report.parts import part_of
    from analysis.runs.load import load

    loaded = load(folder, include, cache)
    drawings = drawings or Drawings()
    drawings.command = command(folder, target, include)
    for warning in loaded.warnings:
        if warning not in drawings.told:
            print(warning, file=sys.stderr)
    drawings.told.update(loaded.warnings)
    out = folder / "report" if out is None else out
    used = loaded.used
    if used.empty and loaded.outside.empty:
        raise RunError(
            f"{folder} holds {len(loaded.runs)} runs and none of them is finished. Finish them by giving the same "
            "command again, or add --include unfinished."
        )
    settings = sorted(map(str, used.setting.unique())) or [""]
    parts = []
    for setting in settings:
        table = used[used.setting == setting]
        figures = out / "figures" / (setting.replace("#", "-") if len(settings) > 1 else "")
        parts.append(part_of(loaded, setting, table, target, figures, drawings))
    return write_pages(loaded, parts, out, watched)


def command(folder: Path, target: float | None, include: tuple[str, ...]) -> str:
    """Returns the command that makes this report again."""
    words = ["python", "-m", "analysis.report", str(folder)]
    words += [] if target is None else ["--target", f"{target:g}"]
    return shlex.join(words + (["--include", ",".join(include)] if include else []))


def watch_report(
    seconds: float, folder: Path, out: Path | None, target: float | None, include: tuple[str, ...], cache: bool
) -> int:
    """Makes the report now and whenever a run has changed, see watch.py. Raises RunError for what can never work."""
    if not 0 < seconds <= 86_400:
        raise RunError(f"--watch {seconds:g} is no pause between two looks: above 0 s, at most a day. Try --watch 10.")
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Give a folder of runs, such as runs/arithmetic-tiny.")
    from analysis.report.drawing import Drawings
    from analysis.report.watch import watch

    page = (folder / "report" if out is None else out) / "report.html"

    drawings = Drawings()
    chosen = (folder, out, target, include, cache, drawings, seconds)
    return watch(folder, page, seconds, drawings, lambda: make_report(*chosen))


if __name__ == "__main__":
    sys.exit(main())
