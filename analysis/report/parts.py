"""One setting of a report: claims, tables, figures. Called by report.py, written by report_page.py."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from analysis.arms import label, require
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import bootstrap, difference, improvement, iqm
from analysis.report.claims import Finding, findings_table, verdicts
from analysis.report.comparisons import Claims
from analysis.report.figures import Figure, all_figures
from analysis.runs.load import Runs
from analysis.stability import stability_table
from analysis.style import arms, plt, save
from analysis.token_consumption import default_target
from analysis.token_figure import tokens_by_arm
from otb.errors import RunError

LARGEST_SVG = 3_000_000  # characters; beyond, the page holds the picture as PNG


@dataclass
class Drawn:
    """A figure of the page: svg (or "" and the PNG file), or the reason why it could not be drawn."""

    figure: Figure
    svg: str = ""
    files: list[Path] = field(default_factory=list)
    problem: str = ""


@dataclass
class Part:
    setting: str
    target: float | None
    claims: pd.DataFrame
    findings: pd.DataFrame
    tables: list[tuple[str, pd.DataFrame]]
    figures: list[Drawn]


def part_of(loaded: Runs, setting: str, table: pd.DataFrame, target: float | None, folder: Path) -> Part:
    """Measures and draws everything of one setting; what cannot be is there with its reason."""
    if target is None:
        try:
            target = default_target(table)
        except RunError:  # the figures and claims that need evaluations each say so
            target = None
    found: list[Finding] = Claims(table, target if target is not None else float("nan")).findings()
    drawn = [draw(figure, folder) for figure in all_figures(loaded, table, target)]
    return Part(setting, target, verdicts(found), findings_table(found), list(tables_of(table, target)), drawn)


def draw(figure: Figure, folder: Path) -> Drawn:
    """Draws, saves (PDF, PNG, CSV) and keeps the SVG for the page."""
    try:
        axes = figure.draw()
    except RunError as error:
        plt.close("all")
        return Drawn(figure, problem=str(error))
    text = io.StringIO()
    owner = (axes if hasattr(axes, "figure") else axes[0]).figure
    owner.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    owner.set_layout_engine("none")  # the layout is done; every further file would do it again
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :] if len(svg) <= LARGEST_SVG else ""
    return Drawn(figure, svg, save(axes, folder / figure.name))


def tables_of(table: pd.DataFrame, target: float | None):
    """(title, rows) of the tables of a setting; a table whose metrics are missing is left out (its figure says why)."""
    makers = [
        ("Accuracy per arm (interquartile mean over seeds)", accuracy_rows),
        ("OTB against each arm of the same N", comparison_rows),
    ]
    if target is not None:
        makers.append((f"Own tokens to {target:g} held-out accuracy", lambda rows: token_rows(rows, target)))
    makers.append(("Stability", stability_rows))
    for title, make in makers:
        try:
            yield title, make(table)
        except RunError:
            continue


def accuracy_rows(table: pd.DataFrame) -> pd.DataFrame:
    runs, rows = final_accuracy(table), []
    for _, _, text, arm in arms(runs):
        row = {"arm": text, "seeds": len(arm)}
        for column in ("first", "final", "best", "mean"):
            found = bootstrap([arm[column].to_numpy()], lambda x: float(iqm(x)), bounds=(0, 1))
            row |= {column: found.estimate, f"{column} low": found.low, f"{column} high": found.high}
        rows.append(row)
    return pd.DataFrame(rows)


def comparison_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Final accuracy of OTB minus each other arm of its N (paired over shared seeds), and P(an OTB run is better)."""
    runs, rows = final_accuracy(table), []
    for size in sorted(runs.group_size.unique()):
        here = runs[runs.group_size == size]
        ours = by_seed(here[here.baseline == "otb"], "final")
        for baseline in [base for base, *_ in arms(here) if base != "otb"] if ours else []:
            theirs = by_seed(here[here.baseline == baseline], "final")
            gap = difference(ours, theirs)
            better = improvement(list(ours.values()), list(theirs.values()))
            row = {"OTB against": label(baseline, size), "shared seeds": len(ours.keys() & theirs.keys())}
            row |= {"difference": gap.estimate, "low": gap.low, "high": gap.high}
            rows.append(row | {"P(better)": better.estimate, "P low": better.low, "P high": better.high})
    return pd.DataFrame(rows)


def token_rows(table: pd.DataFrame, target: float) -> pd.DataFrame:
    require(table, "evaluation_accuracy", "evaluation_own_tokens_total")
    rows = tokens_by_arm(table, target, resamples=1000)
    rows.insert(0, "arm", [label(*pair) for pair in zip(rows.baseline, rows.group_size, strict=True)])
    return rows.drop(columns=["baseline", "group_size", "target"])


def stability_rows(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for _, _, text, arm in arms(stability_table(table)):
        row = {"arm": text, "seeds": len(arm), "collapsed": int(arm.collapsed.sum())}
        row |= {"steps with a surge": arm.surge_share.mean(), "worst drawdown, mean": arm.worst_drawdown.mean()}
        rows.append(row)
    return pd.DataFrame(rows)
