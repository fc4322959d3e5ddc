"""python notebooks/execute.py: runs every notebook and keeps its outputs in it. The tests run them without keeping."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def execute(path: Path) -> nbformat.NotebookNode:
    """The executed notebook, without the times of its cells. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 900, "startup_timeout": 900, "kernel_name": "python3", "record_timing": False}
    NotebookClient(notebook, resources={"metadata": {"path": str(HERE)}}, **options).execute()
    return notebook


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(path.name)
