"""Reads the guides of docs/ as a newcomer types them: files to write, lines to insert, commands to run."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# A bold path, perhaps with the line after which something is inserted, and the fenced block below it.
EDIT = re.compile(
    r"^\*\*(?:\d+\. )?`(?P<path>[^`\n]+)`\*\*(?:, after the line that begins with `(?P<anchor>[^`\n]+)`)?\n\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^    (python .*)$", re.MULTILINE)
SCRIPT = re.compile(r"^## In the analysis\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Edit(NamedTuple):
    """Holds a block of a guide: a whole new file, or lines to insert after the only line that begins with `anchor`."""

    path: str
    anchor: str | None
    text: str


class Guide(NamedTuple):
    edits: list[Edit]
    commands: list[str]  # each begins with `python `
    script: str | None  # Python of the section "In the analysis"
    text: str  # with single spaces between words


def read_guide(name: str) -> Guide:
    """Reads docs/NAME.md."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf8")
    script = SCRIPT.search(text)
    return Guide(
        edits=[Edit(**found.groupdict()) for found in EDIT.finditer(text)],
        commands=[command.split("  #")[0].strip() for command in COMMAND.findall(text)],
        script=script and script[1],
        text=" ".join(text.split()),
    )


def copy_of_repository(folder: Path) -> Path:
    """Copies the files of the working tree that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def apply(edits: list[Edit], folder: Path) -> None:
    """Types the blocks of a guide into a copy of the repository; a new file must be new and an anchor unique."""
    for edit in edits:
        path = folder / edit.path
        if edit.anchor is None:
            assert not path.exists(), f"{edit.path} is there already."
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(edit.text, encoding="utf8")
            continue
        lines = path.read_text(encoding="utf8").splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.strip().startswith(edit.anchor)]
        assert len(places) == 1, f"{edit.path} has {len(places)} lines that begin with {edit.anchor}."
        lines.insert(places[0] + 1, edit.text)
        path.write_text("".join(lines), encoding="utf8")
