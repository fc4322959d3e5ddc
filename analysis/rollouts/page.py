"""Writes the page of the browser of rollouts: template, style, scripts and data in one file. Needs no network."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from analysis.palette import LINES, SCHEME
from analysis.rollouts.collect import Collection
from analysis.runs.token_colours import FULL_COLOURS
from otb.errors import unwritable

HERE = Path(__file__).parent
SCRIPTS = ("data", "colours", "chart", "group", "page", "token", "controls", "events")  # in the order in which they run
ENDINGS = {"end": "ended by itself", "length": "truncated", "turns": "cut by the turn limit"}
KEYS = {
    "n p": "next, previous prompt",
    "[ ]": "previous, next step",
    "1 2 3 4 5": "colour by " + ", ".join(FULL_COLOURS),
    "/ Enter": "search in the prompts, go to the first found",
    "Tab": "to the next rollout",
    "← →": "previous, next token of the rollout",
    "↑ ↓": "the same token of the rollout above, below",
    "Home End": "first, last token of the rollout",
    "Esc": "choose no token",
    "?": "these keys",
}


def write_page(collection: Collection, title: str, out: Path) -> Path:
    """Writes the page and returns its path. Raises RunError where it cannot be written."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((HERE / "page.html.jinja").read_text(encoding="utf8"))
    has_endings = any(group["endings"] for group in collection.groups)
    page = template.render(
        title=title,
        notes=collection.notes,
        quantities=list(FULL_COLOURS),
        endings=ENDINGS if has_endings else {},
        key_list=KEYS,
        style=SCHEME.read_text(encoding="utf8") + (HERE / "page.css").read_text(encoding="utf8"),
        script="\n".join((HERE / f"{name}.js").read_text(encoding="utf8") for name in SCRIPTS),
        data=in_script(
            {
                "runs": collection.runs,
                "groups": collection.groups,
                "strings": list(collection.strings.numbers),
                "colours": FULL_COLOURS,
                "lines": LINES,
                "endings": ENDINGS,
            }
        ),
        blobs=collection.blobs,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf8")
    except OSError as error:
        raise unwritable(out, error) from error
    return out


def in_script(content: dict) -> str:
    """Returns JSON that can stand in a script element: no text in it can end the element or open a comment."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
