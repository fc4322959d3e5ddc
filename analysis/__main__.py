"""Lists the commands of this package: python -m analysis."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
GUARD = '\nif __name__ == "__main__":'  # a module with it is a command


def index() -> str:
    """Returns the commands, each with the first sentence of its module, and how to learn more."""
    lines = ["Commands that make tables, figures and pages from run directories:"]
    for file in sorted(HERE.rglob("*.py")):
        text = file.read_text(encoding="utf8")
        about = ast.get_docstring(ast.parse(text)) or ""
        if file != Path(__file__) and GUARD in text and not about.startswith("Forwards"):
            lines += ["", *described(module_name(file), about)]
    return "\n".join([*lines, "", "Each of them has --help; docs/analysis.md says what is measured, and how.", ""])


def module_name(file: Path) -> str:
    """Returns what `python -m` takes for a file of this package."""
    return ".".join([HERE.name, *file.relative_to(HERE).with_suffix("").parts]).removesuffix(".__main__")


def described(name: str, about: str) -> list[str]:
    """Returns the lines on one command. about: the docstring of its module."""
    usage = re.search(rf"python -m {re.escape(name)}[^`:\n]*(?=[`:\n])", about)
    said = re.sub(r"^python -m [^:]*: |: `python -m .*", "", about.partition("\n\n")[0].replace("\n", " "))
    words = textwrap.wrap(said[:1].upper() + said[1:], 110)
    return [f"  {usage[0] if usage else f'python -m {name}'}", *(f"      {line}" for line in words)]


if __name__ == "__main__":
    print(index(), end="")
