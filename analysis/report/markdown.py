"""Makes report.md, which has the same tables as the page, and the figures as links. Called by page.py."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.intervals import Interval
from analysis.report.parts import Part
from analysis.runs.load import Runs

RUN_COLUMNS = ["run", "arm", "group_size", "seed", "outcome", "last_step", "commit", "device", "left_out", "marks"]


def markdown(loaded: Runs, parts: list[Part], out: Path) -> str:
    """Returns report.md, which has the same tables, and the figures as links."""
    used = (loaded.runs.left_out == "").sum()
    lines = [f"# Report on {loaded.folder.resolve().name}", "", f"{len(loaded.runs)} runs, {used} used.", ""]
    lines += [f"- {warning}" for warning in loaded.warnings] + [""]
    for part in parts:
        lines += [f"## {part.name}", ""]
        if part.setting:
            lines += ["### Result", "", markdown_table(without_empty_columns(part.result)), "", part.result_note, ""]
        for title, rows in part.tables:
            lines += [f"### {title}", "", markdown_table(without_empty_columns(rows)), ""]
        lines += ["### Figures", ""]
        for drawn in part.figures:
            if drawn.problem:
                lines += [f"Not drawn: {drawn.figure.title}. {drawn.problem}", ""]
                continue
            path = next(file for file in drawn.files if file.suffix == ".png")
            figure = drawn.figure
            lines += [f"![{figure.title}]({os.path.relpath(path, out)})", ""]
            lines += [f"{figure.caption} Made by `{figure.command}`.", ""]
        if part.has_rival:
            lines += ["### Claims", "", markdown_table(part.claims), ""]
    lines += ["## Runs", "", markdown_table(loaded.runs.reindex(columns=RUN_COLUMNS)), ""]
    return "\n".join(lines)


def markdown_table(rows: pd.DataFrame) -> str:
    """Returns a table in Markdown, numbers with three significant digits."""
    if rows.empty:
        return "(nothing)"
    texts = [[cell_text(value) for value in row] for row in rows.itertuples(index=False)]
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in texts]
    head = f"| {' | '.join(map(str, rows.columns))} |\n|{'---|' * len(rows.columns)}"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in cells)])


def without_empty_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns a table without the columns in which nothing was measured or said."""
    return rows[[name for name in rows.columns if rows[name].map(cell_text).any()]]


def cell_text(value) -> str:
    """Returns a cell as text with three significant digits; "" where nothing was measured.

    An interval becomes "0.79 [0.77, 0.81]", the estimate alone where there are too few seeds.
    """
    if isinstance(value, Interval):
        low, high = cell_text(value.low), cell_text(value.high)
        text = cell_text(float(value.estimate)) + (f" [{low}, {high}]" if low or high else "")
        return text.replace("-", "\u2212")
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer() and abs(value) >= 1):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
