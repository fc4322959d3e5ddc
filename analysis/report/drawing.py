"""Draws the figures of a part, side by side on the cores there are, and keeps those whose rows did not change."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.style import figure_of, plt, save
from otb.errors import RunError

LARGEST_SVG = 3_000_000  # characters; beyond, the page holds the picture as PNG
FEWEST = 4  # figures that are worth a second process
MOST = 4  # processes: each holds a copy of the figures that it draws


class Figure(NamedTuple):
    """A figure of a report, not drawn yet."""

    name: str  # of the files
    caption: str
    rows: tuple[pd.DataFrame, ...]  # what it draws from: where these and the caption stay, so does the picture
    draw: Callable  # () -> axes
    command: str = ""  # that makes it

    @property
    def title(self) -> str:
        """Returns the name as words: "Reward over steps, N=4"."""
        words = re.sub(r"_n(\d+)$", r", N=\1", self.name).replace("_", " ")
        return words[0].upper() + words[1:]


@dataclass
class Drawn:
    """A figure of the page: svg (or "" and the PNG file), or the reason why it could not be drawn."""

    figure: Figure
    svg: str = ""
    files: list[Path] = field(default_factory=list)
    problem: str = ""


class Drawings:
    """Draws figures, and returns those that it has drawn before from the same rows; lives while a report is watched.

    command: what makes the report, for captions and files. drawn: how many figures were drawn so far. told: warnings
    that were printed.
    """

    def __init__(self, command: str = "") -> None:
        self.command = command
        self.kept: dict[Path, tuple[str, Drawn]] = {}
        self.drawn = 0
        self.told: set[str] = set()

    def draw_all(self, figures: list[Figure], folder: Path) -> list[Drawn]:
        """Returns the figures drawn and saved in `folder`, in their order."""
        figures = [figure._replace(command=self.command) for figure in figures]
        digests = {id(rows): digest(rows) for figure in figures for rows in figure.rows}
        keys = ["/".join([figure.caption, *(digests[id(rows)] for rows in figure.rows)]) for figure in figures]
        paths = [folder / figure.name for figure in figures]
        known = [self.kept.get(path, ("", None))[0] == key for path, key in zip(paths, keys, strict=True)]
        new = [figure for figure, is_known in zip(figures, known, strict=True) if not is_known]
        self.drawn += len(new)
        results = iter(draw_side_by_side(new, folder))
        for path, key, is_known in zip(paths, keys, known, strict=True):
            if not is_known:
                self.kept[path] = (key, next(results))
        return [self.kept[path][1] for path in paths]


def digest(rows: pd.DataFrame) -> str:
    """Returns a text that changes with a table."""
    content = pd.util.hash_pandas_object(rows, index=False).to_numpy().tobytes()
    return hashlib.sha256(f"{list(rows.columns)}".encode() + content).hexdigest()


def draw_side_by_side(figures: list[Figure], folder: Path) -> list[Drawn]:
    """Draws figures in forked processes, which have the rows already; one after the other where fork is not safe."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cores == 1 or len(figures) < FEWEST:
        return [draw(figure, folder) for figure in figures]
    pool = ProcessPoolExecutor(min(cores, MOST), get_context("fork"), _begin, (figures, folder))
    try:
        results = list(pool.map(_draw, range(len(figures))))
    finally:
        pool.shutdown(cancel_futures=True)
    return [Drawn(figure, *result) for figure, result in zip(figures, results, strict=True)]


_work: tuple[list[Figure], Path] = ([], Path())  # of a process that draws; figures hold functions, which no pipe takes


def _begin(figures: list[Figure], folder: Path) -> None:
    global _work
    _work = figures, folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one ends the others


def _draw(place: int) -> tuple[str, list[Path], str]:
    figures, folder = _work
    drawn = draw(figures[place], folder)
    return drawn.svg, drawn.files, drawn.problem


def draw(figure: Figure, folder: Path) -> Drawn:
    """Draws a figure, saves it (PDF, PNG, CSV) and keeps the SVG for the page."""
    try:
        axes = figure.draw()
    except RunError as error:
        plt.close("all")
        return Drawn(figure, problem=str(error))
    text = io.StringIO()
    owner = figure_of(axes)
    owner.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :] if len(svg) <= LARGEST_SVG else ""
    about = f"{figure.caption} Made by: {figure.command}"
    with plt.rc_context({"figure.constrained_layout.use": False}):
        owner.set_layout_engine(None)  # the layout is done; with any engine, even "none", a file is drawn twice
        files = save(axes, folder / figure.name, title=figure.title, about=about)
    return Drawn(figure, svg, files)
