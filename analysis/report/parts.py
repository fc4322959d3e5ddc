"""Makes the part of a report on one setting: claims, tables, figures. Called by __main__.py, written by page.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.claims.rules import UNDECIDED
from analysis.report.claims import claims_table, decisions
from analysis.report.drawing import Drawings, Drawn
from analysis.report.figures import all_figures, main_figure
from analysis.report.tables import result_note, result_rows, tables_of
from analysis.runs.load import Runs
from analysis.runs.marks import setting_labels
from analysis.token_consumption import default_target
from otb.errors import RunError


@dataclass
class Part:
    """What a report says about one setting.

    label: what distinguishes it from others of its task and model. target: accuracy of the token comparison. result:
    final accuracy per arm, empty where nothing was evaluated; result_note says why, or what is averaged. has_rival:
    whether OTB was run beside another arm, so that claims can be decided.
    """

    setting: str
    label: str
    target: float | None
    result: pd.DataFrame
    result_note: str
    has_rival: bool
    claims: pd.DataFrame
    tables: list[tuple[str, pd.DataFrame]]
    figures: list[Drawn]
    main: Drawn | None = None

    @property
    def id(self) -> str:
        """Returns the id of the part on the page."""
        return "setting-" + re.sub(r"[^a-z0-9]+", "-", self.setting.lower()) if self.setting else "outside-runs"

    @property
    def heading(self) -> str:
        """Returns the setting as words: "arithmetic_tools, tiny policy"."""
        task, _, model = self.setting.partition("#")[0].partition("-")
        return f"{task}, {model} policy" if task else "Outside runs"

    @property
    def name(self) -> str:
        """Returns heading and label: "arithmetic, tiny policy, learning_rate=0.01"."""
        return f"{self.heading}, {self.label}" if self.label else self.heading

    @property
    def is_decided(self) -> bool:
        """Tells whether any claim has another verdict than undecided."""
        return bool((self.claims.verdict != UNDECIDED).any())

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
        claims = [(f"{self.id}-claims", "Claims")] if self.has_rival else []
        return [*tables, (f"{self.id}-figures", "Figures"), *claims]


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
    name = setting_labels(loaded.runs).get(setting, "")
    result = result_of(table)
    tables = list(tables_of(table, target))
    return Part(setting, name, target, *result, has_rival(table), claims, tables, drawn, main)


def result_of(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns the first table of a setting and its note; an empty table and the reason where it cannot be made."""
    try:
        return result_rows(table), result_note(table)
    except RunError as error:
        return pd.DataFrame(), str(error)


def has_rival(table: pd.DataFrame) -> bool:
    """Tells whether OTB and another arm were run."""
    arms = set(table.baseline.astype(str))
    return "otb" in arms and len(arms) > 1
