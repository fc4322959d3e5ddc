"""Turns run directories into tables, statistics, figures and a report. Of otb it imports records and errors alone."""

from importlib.util import find_spec

_NEEDED = ("jinja2", "matplotlib", "pandas", "psutil", "pyarrow", "rich", "scipy", "yaml")
_MISSING = [name for name in _NEEDED if not find_spec(name)]
if _MISSING:
    raise ModuleNotFoundError(
        f"analysis needs {', '.join(_MISSING)}, which the library alone does not bring. "
        "Run `pip install 'otb[analysis]'`.",
        name=_MISSING[0],
    )
