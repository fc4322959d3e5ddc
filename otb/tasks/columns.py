"""Reads questions, answers and solutions from the columns of a data set in any row format, for otb.tasks.maths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from otb.tasks.duplicates import first_of_equal
from otb.tasks.grading import extract_answer

if TYPE_CHECKING:
    from datasets import Dataset


def prompt_messages(question: str | list | None, system_prompt: str | None, instruction: str | None) -> list[dict]:
    """Returns chat messages that end with the user's; [] for an empty question. Raises ValueError for other types."""
    if question is None or not question:
        return []
    if isinstance(question, str):
        messages = [{"role": "user", "content": question.strip()}] if question.strip() else []
    elif isinstance(question, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in question):
        messages = [{"role": message["role"], "content": message["content"]} for message in question]
    else:
        raise ValueError(f"The question {str(question)[:80]!r} must be a string or a list of chat messages.")
    if not messages:
        return []
    if messages[-1]["role"] != "user":
        raise ValueError(f"A prompt ends with the role {messages[-1]['role']!r}; the last message must be the user's.")
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    if instruction is not None and instruction not in messages[-1]["content"]:
        messages[-1]["content"] += "\n\n" + instruction
    return messages


def reference(cell: Any, answer_after: str | None) -> str:
    """Returns the reference as a string, '' if there is none; 27.0 -> '27'. Raises ValueError for other types."""
    if cell is None or cell != cell:  # NaN, as pandas writes an empty number
        return ""
    if isinstance(cell, bool) or not isinstance(cell, (str, int, float)):
        raise ValueError(f"The answer {str(cell)[:80]!r} ({type(cell).__name__}) must be a string or a number.")
    text = str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
    if answer_after is not None:
        text = text.rpartition(answer_after)[2] if answer_after in text else ""
    boxed = extract_answer(text) if "\\boxed" in text else None
    return (boxed or text).strip()


def worked_solution(cell: Any, answer: str, answer_after: str | None) -> str:
    r"""Returns the solution as a response that the grader accepts, ending with \boxed{}; '' if there is none.

    The answer's own line (GSM8K: `#### 72`) and a calculator's notes (`48/2 = <<48/2=24>>24`) are removed.
    """
    text = cell if isinstance(cell, str) else ""
    if answer_after is not None and answer_after in text:
        text = text.rpartition(answer_after)[0]
    text = re.sub(r"<<[^<>]*>>", "", text).strip()
    return f"{text}\n\\boxed{{{answer}}}" if text and "\\boxed" not in text else text


def cell_at(row: Mapping, column: str) -> Any:
    """Returns the cell at a dotted path; None if this row lacks a part of the path."""
    cell: Any = row
    for part in column.split("."):
        cell = cell.get(part) if isinstance(cell, Mapping) else None
    return cell


def distinct_rows(rows: Dataset, columns: tuple[str, ...]) -> Dataset:
    """Returns the rows that differ from all earlier ones in these columns (names or dotted paths), in order."""
    import pyarrow.compute as pc

    table = rows.with_format("arrow")[:]
    paths = [column.split(".") for column in columns]
    cells = [pc.struct_field(table[outer], inner) if inner else table[outer] for outer, *inner in paths]
    return rows.select(first_of_equal(cells))


def require_column(rows: Dataset, column: str, name: str, path: str | None) -> None:
    """Raises ValueError unless the rows have the column, which is a name or a dotted path."""
    outer, *inner = column.split(".")
    columns = list(rows.column_names)
    if outer in columns and inner:
        cell = rows[0][outer]
        columns = [f"{outer}.{key}" for key in cell] if isinstance(cell, dict) else [outer]
    if ".".join([outer, *inner[:1]]) not in columns:
        raise ValueError(
            f"Column {column!r} of task {name} is not in path={path!r}; found: {', '.join(sorted(columns))}. Set "
            f"task.question_column and task.answer_column."
        )
