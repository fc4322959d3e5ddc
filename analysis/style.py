"""Decides how figures look and saves them: one style, two widths, PDF + PNG + the plotted numbers as CSV.

What is particular to an arm, its label, colour and marker, is in arms.py.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from fontTools import subset

from analysis.intervals import FEWEST

# What shapes text stays out of a PDF's fonts, as a PDF places every glyph itself: the subset is made in a third of the
# time.
subset.Options._drop_tables_default += ["GDEF", "GPOS", "GSUB"]
plt.style.use(Path(__file__).with_name("paper.mplstyle"))
COLUMN, PAGE = 3.25, 6.75  # inches: one column of a two-column paper, and its full width
LEGEND_LINE = 0.17  # inches of height
DASHES = ("-", "--", ":", "-.")


def dash(size: float, sizes: Iterable[float]) -> str:
    """Returns the line style of a group size, where one figure shows several."""
    order = sorted(set(sizes))
    return DASHES[order.index(size) % len(DASHES)] if size in order else ":"


def seeds_text(seeds: Collection[int]) -> str:
    """Returns "5 seeds", or "3-5 seeds" where arms differ; every figure says it."""
    low, high = min(seeds), max(seeds)
    return f"{low} seed{'s' if low != 1 else ''}" if low == high else f"{low}-{high} seeds"


def interval_text(seeds: Collection[int], what: str = "band") -> str:
    """Returns the end of a title: which mark is the interval, and that few seeds have none. seeds: per arm or point."""
    if max(seeds) < FEWEST:
        return f"; no interval below {FEWEST} seeds"
    return f"; {what}: 95 % interval" + (f", from {FEWEST} seeds on" if min(seeds) < FEWEST else "")


def figure(columns: int = 1, width: float = COLUMN, height: float = 2.3, rows: int = 1, **options):
    """Makes a figure in the project's style; returns it with its axes, an array where there are several."""
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def legend_below(axes) -> None:
    """Puts one legend of all the axes below them, as curves fill them; for a long one the figure grows.

    axes: of one figure, or an array of them. What several show stands once.
    """
    found: dict[str, Any] = {}
    for ax in np.ravel(axes):
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    drawn = figure_of(axes)
    columns = 3 if drawn.get_figwidth() > 4 else 2
    lines = -(-len(found) // columns)
    drawn.set_figheight(drawn.get_figheight() + LEGEND_LINE * max(0, lines - 2))
    drawn.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, columnspacing=1.0)


def figure_of(axes):
    """Returns the figure that axes, or an array of them, belong to."""
    return (axes if hasattr(axes, "figure") else np.ravel(axes)[0]).figure


def keep_numbers(axes, plotted: pd.DataFrame) -> None:
    """Leaves what is plotted with the figure; `save` writes it as CSV."""
    figure_of(axes).plotted = plotted


def numbers(axes) -> pd.DataFrame:
    """Returns what a figure function plotted, as `save` writes it."""
    return figure_of(axes).plotted


def show(axes):
    """Returns the figure as an image for a notebook's output and closes it."""
    from IPython.display import Image

    drawn, picture = figure_of(axes), io.BytesIO()
    drawn.savefig(picture, dpi=130)
    plt.close(drawn)
    return Image(picture.getvalue())


def save(axes, path: Path, pictures: tuple[str, ...] = ("pdf", "png"), title: str = "", about: str = "") -> list[Path]:
    """Writes a figure and what it plots, then closes it.

    Args:
        axes: of the figure, or an array of them.
        path: of the files, without an ending.
        pictures: endings of the pictures.
        title, about: what the pictures say of themselves in their metadata, such as the command that made them.

    Returns:
        The files: path.pdf, path.png and path.csv.
    """
    drawn = figure_of(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{ending}") for ending in (*pictures, "csv")]
    for file, ending in zip(files, pictures, strict=False):
        told = {"Title": title, "Subject" if ending == "pdf" else "Description": about}
        metadata = {key: text for key, text in told.items() if text}
        drawn.savefig(file, metadata=metadata | ({"CreationDate": None} if ending == "pdf" else {}))
    numbers(axes).to_csv(files[-1], index=False, float_format="%.8g")
    plt.close(drawn)
    return files
