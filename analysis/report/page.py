"""Writes report.md and the self-contained report.html from the parts of a report. The template is page.html.jinja."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd

from analysis.intervals import Interval
from analysis.palette import SCHEME
from analysis.report.drawing import Drawn
from analysis.report.markdown import RUN_COLUMNS, cell_text, markdown, without_empty_columns
from analysis.report.overview import INTERVAL, lead, main_part, overview, verdict_rows
from analysis.report.parts import Part
from analysis.report.watch import announce
from analysis.runs.load import Runs
from analysis.runs.marks import setting_differences
from analysis.runs.samples import own_tokens, read_group
from analysis.runs.token_colours import background, largest
from analysis.style import COLUMN
from otb.errors import RunError
from otb.files import write_atomically

HERE = Path(__file__).parent
SCRIPTS = ("page.js", "watch.js")  # the second one for a page that renews itself
LONG_TEXT = 40  # characters of a cell that gets room for whole sentences
RUNS_WITH_SAMPLES = 100  # a page of every group of 1,000 runs would not open
ROLLOUTS_SHOWN = 4


def write_pages(loaded: Runs, parts: list[Part], out: Path, watched: float | None = None) -> Path:
    """Writes report.html and report.md, no reader sees half of one, and returns the path of the first.

    watched: seconds between two looks at the runs, for a page that renews itself.
    """
    out.mkdir(parents=True, exist_ok=True)
    template = jinja2.Template((HERE / "page.html.jinja").read_text(encoding="utf8"))
    page = template.render(
        title=f"Report on {loaded.folder.resolve().name}",
        style=SCHEME.read_text(encoding="utf8") + (HERE / "page.css").read_text(encoding="utf8"),
        script="".join((HERE / file).read_text(encoding="utf8") for file in SCRIPTS[: 1 if watched is None else 2]),
        watched=watched,
        loaded=loaded,
        lead=lead(loaded),
        overview=overview(loaded, parts),
        verdicts=verdict_rows(parts),
        decided=any(part.has_rival and part.is_decided for part in parts),
        first=main_part(loaded, parts),
        parts=parts,
        differences=setting_differences(loaded.runs) if len(parts) > 1 else {},
        runs=[run_entry(loaded, row, place) for place, row in enumerate(loaded.runs.to_dict("records"))],
        run_table=html_table(loaded.runs.reindex(columns=RUN_COLUMNS), link="run"),
        table=lambda rows: html_table(without_empty_columns(rows)),
        picture=picture,
        is_wide=is_wide,
        relative=lambda path: os.path.relpath(path, out),
    )
    version = hashlib.sha256(page.encode()).hexdigest()[:12]
    write_atomically(out / "report.md", markdown(loaded, parts, out))
    write_atomically(out / "report.html", page.replace("VERSION", version, 1) if watched else page)
    if watched:
        announce(out / "report.html", version)
    return out / "report.html"


def html_table(rows: pd.DataFrame, link: str | None = None) -> str:
    """Returns a sortable table; data-sort keeps the full number. link: a column whose cells open that run."""
    head = ""
    for name in rows.columns:
        is_number = pd.api.types.is_numeric_dtype(rows[name]) or rows[name].map(lambda v: isinstance(v, Interval)).any()
        kind = ' class="number"' if is_number else ""
        head += f"<th{kind}><button>{html.escape(str(name))}</button></th>"
    body = []
    for row in rows.itertuples(index=False):
        cells = []
        for name, value in zip(rows.columns, row, strict=True):
            number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            sort = f' class="number" data-sort="{value}"' if number else ""
            if isinstance(value, Interval):
                sort = f' class="number" data-sort="{value.estimate}"'
            text = html.escape(cell_text(value))
            if name == link:
                text = f'<a href="#" data-open="{html.escape(str(value))}">{text}</a>'
            elif len(text) > LONG_TEXT:
                sort = ' class="long"'
            if name == INTERVAL:
                sort = ' class="interval"'
            if name == "verdict":
                sort = f' class="{text.replace(" ", "-")}"'
            cells.append(f"<td{sort}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def picture(drawn: Drawn) -> str:
    """Returns the inline SVG, or the PNG as a data URI where the SVG is too large, with the figure's title."""
    title = html.escape(drawn.figure.title)
    if drawn.svg:
        return drawn.svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    png = next(file for file in drawn.files if file.suffix == ".png")
    return f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}">'


def is_wide(drawn: Drawn) -> bool:
    """Tells whether a figure has the width of a paper's page, and so takes the page's whole column."""
    width = re.search(r'width="([\d.]+)pt"', drawn.svg[:500])
    return not width or float(width[1]) > 72 * COLUMN + 1


def run_entry(loaded: Runs, run: dict, place: int) -> dict:
    """Returns what the page shows of a run: its configuration and one prompt group of its last samples."""
    skipped = {"error", "left_out", "marks", "damaged_lines"}
    config = {key: value for key, value in run.items() if key not in skipped and not pd.isna(value)}
    lines = "\n".join(f"{key}: {value}" for key, value in config.items())
    entry = {"name": run["run"], "config": lines, "notes": [run[key] for key in ("left_out", "marks", "error")]}
    entry["notes"] = [note for note in entry["notes"] if isinstance(note, str) and note]
    if place >= RUNS_WITH_SAMPLES or run["kind"] != "otb":
        return entry | {
            "samples": "",
            "no_samples": "not shown on this page; notebooks/03_inspect_run.ipynb shows them",
        }
    try:
        return entry | {"samples": samples_html(read_group(loaded.directory(run["run"])))}
    except (RunError, OSError, ValueError, KeyError, StopIteration) as error:
        return entry | {"samples": "", "no_samples": str(error) or "damaged"}


def samples_html(group: pd.DataFrame) -> str:
    """Returns a prompt group as HTML: own tokens on the colour of their advantage, tool tokens grey."""
    limit = largest(group.advantages)
    parts = [f"<p class=prompt>{html.escape(str(group.prompt_text.iloc[0]))}</p>"]
    for _, rollout in group.head(ROLLOUTS_SHOWN).iterrows():
        advantages, spans = iter(rollout.advantages), []
        for token, own in zip(rollout.tokens, rollout.own, strict=True):
            text = html.escape(token)
            if not own:
                spans.append(f"<i>{text}</i>")
                continue
            value = float(next(advantages))
            colour = background(value, limit)
            style = "outline:1px solid" if colour is None else f"background:rgb{colour}"
            spans.append(f'<span style="{style}" title="advantage {value:.3f}">{text}</span>')
        own_count = len(own_tokens(rollout))
        parts.append(f"<p><b>reward {rollout.reward:g}, {own_count} own tokens</b><br>{''.join(spans)}</p>")
    if len(group) > ROLLOUTS_SHOWN:
        parts.append(f"<p>{len(group) - ROLLOUTS_SHOWN} more rollouts of this group are in rollouts/.</p>")
    return "".join(parts)
