"""Makes the part of a report on one setting: claims, tables, figures. Called by __main__.py, written by page.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.report.claims import claims_table, decisions
from analysis.report.drawing import Drawings, Drawn
from analysis.report.figures import all_figures, main_figure
from analysis.report.tables import tables_of
from analysis.runs.load import Runs
from analysis.token_consumption import default_target
from otb.errors import RunError


@dataclass
class Part:
    """What a report says of one setting. target: accuracy of the token comparison."""

    setting: str
    target: float | None
    claims: pd.DataFrame
    tables: list[tuple[str, pd.DataFrame]]
    figures: list[Drawn]
    main: Drawn | None = None

    @property
    def digest(self) -> str:
        """Returns what tells this setting from others of its task and model."""
        return self.setting.partition("#")[2]

    @property
    def id(self) -> str:
        """Returns the id of the part on the page."""
        return "setting-" + re.sub(r"[^a-z0-9]+", "-", self.setting.lower()) if self.setting else "outside-runs"

    @property
    def heading(self) -> str:
        """Returns the setting as words: "Arithmetic, tiny policy"."""
        task, _, model = self.setting.partition("#")[0].partition("-")
        words = task.replace("_", " ")
        return f"{words[:1].upper()}{words[1:]}, {model} policy" if words else "Outside runs"

    @property
    def shown_tables(self) -> list[tuple[str, str, str, pd.DataFrame]]:
        """Returns (heading, note, id, rows) per table: what a title has in brackets is the note below it."""
        shown = []
        for place, (title, rows) in enumerate(self.tables):
            words, _, note = title.partition(" (")
            shown.append((words, note.removesuffix(")").capitalize(), f"{self.id}-table-{place}", rows))
        return shown

    @property
    def sections(self) -> list[tuple[str, str]]:
        """Returns (id, heading) of every section, for the table of contents."""
        tables = [(id, text) for text, _, id, _ in self.shown_tables]
        return [(f"{self.id}-claims", "Claims"), *tables, (f"{self.id}-figures", "Figures")]


def part_of(
    loaded: Runs, setting: str, table: pd.DataFrame, target: float | None, folder: Path, drawings: Drawings
) -> Part:
    """Measures and draws everything of one setting; what cannot be is there with its reason."""
    claims = claims_table(decisions(table, target))
    if target is None:
        try:
            target = default_target(table)
        except RunError:  # the figures that need evaluations each say so
            target = None
    first, figures = main_figure(table), list(all_figures(loaded, table, target))
    drawn = drawings.draw_all([first, *figures] if first else figures, folder)
    main = drawn.pop(0) if first else None
    tables = list(tables_of(table, target))
    return Part(setting, target, claims, tables, drawn, main)
