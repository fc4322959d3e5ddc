"""Prints the results of an evaluation: a row per policy and task, and for a run its peak and final accuracy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from analysis.evaluations import peak_and_final, read_samples, right_answers, sampling_error
from experiments.evaluation.folder import EvaluationFolder
from experiments.evaluation.policies_of import Plan


def report(plan: Plan) -> None:
    """Prints the plan's complete evaluations, including evaluations of deleted checkpoints."""
    k, found = plan.cfg.k, []
    for task in plan.configurations:
        folder = plan.folder_of_all(task)
        paths = [folder] if plan.run is None else sorted(folder.glob("step-*"))
        found += [EvaluationFolder(path) for path in paths if EvaluationFolder(path).has(k)]
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    if not found:
        console.print("no evaluation is complete", highlight=False)
        return
    console.print(results_table([folder.results_of(k) for folder in found]))
    if plan.run is not None:
        console.print(peak_table(found, k))
    for path in dict.fromkeys(folder.path if plan.run is None else folder.path.parent for folder in found):
        console.print(f"samples and results: {path}", soft_wrap=True, highlight=False)


def results_table(found: list[dict]) -> Table:
    """Returns the table of results, with a row per evaluation. found: results.json of each evaluation."""
    k = found[0]["k"]
    columns = {"avg_at_k": f"avg@{k}", "pass_at_k": f"pass@{k}", "maj_at_k": f"maj@{k}", "truncated": "truncated"}
    columns |= {"cut_by_turns": "cut by turns", "right_and_ended": "right, ended", "right_not_ended": "right, cut"}
    columns |= {"own_tokens": "own tokens", "unscored": "unscored"}
    measured = [{row["measure"]: row for row in results["measures"] if row["k"] == k} for results in found]
    shown = [name for name in columns if any(name in rows and worth_a_column(name, rows) for rows in measured)]
    of_run = f"{escape(found[0]['policy'])}, " if found[0]["step"] is not None else ""
    title = f"{of_run}k = {k}; 95 % intervals over problems"
    table = Table(Column("policy" if not of_run else "step", overflow="fold"), title=title)
    for column in ("task", "problems", *(columns[name] for name in shown)):
        table.add_column(column)
    for results, rows in zip(found, measured, strict=True):
        policy = escape(results["policy"]) if results["step"] is None else str(results["step"])
        cells = [cell(name, rows[name]) if name in rows else "" for name in shown]
        table.add_row(policy, results["task"], str(results["problems"]), *cells)
    return table


def worth_a_column(name: str, rows: dict) -> bool:
    """Returns whether a measure has a column; rare events have one only if they occurred."""
    return name not in ("unscored", "cut_by_turns") or rows[name]["estimate"] > 0


def cell(name: str, row: dict) -> str:
    """Returns an estimate as text, with an interval for the accuracies."""
    if row["estimate"] is None:
        return "unknown"
    if name == "own_tokens":
        return f"{row['estimate']:,.1f}"
    if name not in ("avg_at_k", "pass_at_k", "maj_at_k") or row["low"] is None:
        return f"{row['estimate']:.3f}"
    return f"{row['estimate']:.3f} \\[{row['low']:.3f}, {row['high']:.3f}]"


def peak_table(found: list[EvaluationFolder], k: int) -> Table:
    """Returns a table of a run's peak and final accuracy per task. found: evaluations of its checkpoints."""
    by_task: dict[str, dict[int, NDArray]] = {}
    for folder in found:
        results = folder.results()
        by_task.setdefault(results["task"], {})[results["step"]] = right_answers(read_samples(folder.path, k))
    return peaks(by_task, k, "checkpoints")


def peaks(by_task: dict[str, dict[int, NDArray]], k: int, of: str) -> Table:
    """Returns a table of peak and final accuracy per task.

    by_task: task -> step -> (problems, k) of 1, 0 or NaN. of: title of the column that counts the steps, such as
    "checkpoints".
    """
    table = Table(title=f"avg@{k} of the run: a peak is too high, because it is the largest of several noisy numbers")
    for column in ("task", of, "final (step)", "peak (step)", "peak without its luck", "sampling error"):
        table.add_column(column)
    for task, right in by_task.items():
        best = peak_and_final(right)
        last = right[int(best["final_step"])]
        error = sampling_error((~np.isnan(last)).sum(1), np.nansum(last, axis=1))
        table.add_row(
            task,
            str(best["checkpoints"]),
            f"{best['final']:.3f} ({best['final_step']})",
            f"{best['peak']:.3f} ({best['peak_step']})",
            f"{best['peak_held_out']:.3f}" if "peak_held_out" in best else "",
            "" if math.isnan(error) else f"{error:.3f}",
        )
    table.caption = (
        "peak without its luck: one half of the samples selects the step, the other half measures it; "
        "sampling error: the standard error of one of these numbers from sampling alone"
    )
    return table
