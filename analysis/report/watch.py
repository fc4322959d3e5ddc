"""Makes a report anew whenever a run has changed, and tells the open page of it: --watch of __main__.py.

A page from disk may not read files, but it may load a script: beside the page lies report.version.js, which calls
`renewed` with the page's version. watch.js loads it again and again, and reloads the page where it is another one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from analysis.report.drawing import Drawings
from analysis.runs.read_run import find_runs, fingerprint
from otb.errors import STOPPED_FROM_KEYBOARD, RunError
from otb.files import write_atomically


def watch(folder: Path, page: Path, seconds: float, drawings: Drawings, make: Callable[[], object]) -> int:
    """Makes a report now and whenever a run has changed, until Ctrl-C.

    Args:
        folder: of the runs.
        page: report.html.
        seconds: between two looks at the files of the runs.
        drawings: what the watch had drawn so far.
        make: writes the report with these drawings; may raise RunError, as before the first run is finished.

    Returns:
        The exit status.
    """
    print(f"watching {folder}: a look every {seconds:g} s, Ctrl-C ends it\nreport: {page}", flush=True)
    known = None
    try:
        while True:
            prints = {path: fingerprint(path) for path in find_runs(folder)}
            if prints != known:
                print(f"{time.strftime('%H:%M:%S')} {renew(drawings, make)}", flush=True)
                known = prints
            time.sleep(seconds)
    except KeyboardInterrupt:
        print("\nstopped; the page stays as it is", file=sys.stderr)
        return STOPPED_FROM_KEYBOARD
    finally:
        if page.exists():
            announce(page, "")


def renew(drawings: Drawings, make: Callable[[], object]) -> str:
    """Makes the report; returns what happened, in words."""
    before, started = drawings.drawn, time.perf_counter()
    try:
        make()
    except RunError as error:
        return f"waiting: {error}"
    count = drawings.drawn - before
    return f"report made in {time.perf_counter() - started:.1f} s, {count} figure{'s' if count != 1 else ''} drawn"


def announce(page: Path, version: str) -> None:
    """Tells the open page which version lies on the disk; "" says that nobody renews it any more."""
    write_atomically(page.with_suffix(".version.js"), f'renewed("{version}");\n')
