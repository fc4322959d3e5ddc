"""What the readers of analysis give: Arrow tables of numbers, facts, mappings from files that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.json
import yaml

from otb.records import METRICS

NUMBER = pa.float64()
METRICS_SCHEMA = pa.schema([(name, NUMBER) for name in METRICS])


class RunRecord(NamedTuple):
    facts: dict  # one row of the table of runs, configuration keys flat under their own names
    steps: pa.Table  # metrics, one row per step
    evaluations: pa.Table  # the same for evaluations; columns named evaluation_*
    warnings: list[str]  # damaged lines, counted per file


def read_metrics(file: Path) -> tuple[pa.Table, int]:
    """-> (rows, damaged lines). Arrow's parser reads an undamaged file ten times faster than Python does."""
    try:
        if file.stat().st_size == 0:
            return read_lines(file)
        table = pyarrow.json.read_json(
            file,
            read_options=pyarrow.json.ReadOptions(use_threads=False),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=METRICS_SCHEMA),
        )
    except (pa.ArrowInvalid, FileNotFoundError):
        return read_lines(file)
    if table["step"].null_count:
        return read_lines(file)
    kept = [field.name for field in table.schema if field.type == NUMBER or pa.types.is_integer(field.type)]
    kept = [name for name in kept if table[name].null_count < len(table)]
    return table.select(kept).cast(pa.schema([(name, NUMBER) for name in kept])), 0


def read_lines(file: Path) -> tuple[pa.Table, int]:
    """-> (rows with a step, lines that are no such row). Values that are not numbers are left out."""
    rows, damaged = [], 0
    if file.exists():
        for line in file.read_bytes().splitlines():
            try:
                row = json.loads(line)
                float(row["step"])
                rows.append(row)
            except (ValueError, KeyError, TypeError):  # ValueError: JSON and UTF-8 alike
                damaged += bool(line.strip())
    return table_of(rows), damaged


def table_of(rows: list[dict]) -> pa.Table:
    """Rows of numbers -> float64 columns; "step" is always one of them."""
    numeric = [{k: float(v) for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    names = dict.fromkeys(name for row in numeric for name in row) or {"step": None}
    return pa.table({name: pa.array([row.get(name) for row in numeric], NUMBER) for name in names})


def read_mapping(file: Path, parse, warnings: list[str]) -> dict:
    try:
        found = parse(file.read_text(encoding="utf8"))
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError):
        warnings.append(f"{file}: damaged, not read")
        return {}
    return found if isinstance(found, dict) else {}


def yaml_mapping(text: str):
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
