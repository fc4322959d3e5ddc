"""The table at the end of a run or a sweep. Reads run directories only."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table

from experiments.sweeps.jobs import load_jobs
from otb.errors import CRASHED
from otb.records import RunDirectory, read_rows


def print_table(paths: list[Path]) -> None:
    """Prints the table at the width of the terminal; in a file or pipe wide enough for the names of runs."""
    console = Console()
    console = Console(width=console.width if console.is_terminal else 120)
    console.print(summary_table(paths))
    for path in paths if len(paths) == 1 else ():
        if (table := sets_table(RunDirectory(path))) is not None:
            console.print(table)


def sets_table(directory: RunDirectory) -> Table | None:
    """Returns peak and final accuracy on each set of a run's evaluation.tasks; None for a run without them."""
    if not any(directory.evaluations.glob("step-*.parquet")):  # it has not come that far
        return None
    config = OmegaConf.load(directory.config_file)
    if not OmegaConf.select(config, "evaluation.tasks"):
        return None
    from analysis.evaluations import read_run_samples, right_answers  # scipy: a second
    from experiments.evaluation.accuracy_table import peaks

    by_task: dict[str, dict] = {}
    for (task, step), samples in read_run_samples(directory.path).groupby(["task", "step"], sort=False):
        by_task.setdefault(task, {})[step] = right_answers(samples)
    return peaks(by_task, config.evaluation.samples, "evaluations")


def summary_table(paths: list[Path]) -> Table:
    """Returns a table of runs: state, steps, held-out accuracy before, best and last, own tokens, time of the steps.

    What the best one is stands below it: the largest of several noisy numbers.
    """
    several, caption = len(paths) > 1, "best: the largest of several noisy numbers, and so too high"
    table = Table("state", "steps", "accuracy before", "best", "last", "own tokens", "minutes", caption=caption)
    if several:
        table = Table(Column("run", overflow="fold"), *table.columns, caption=caption)
    for path, name in zip(paths, distinct_names(paths), strict=True):
        directory = RunDirectory(path)
        status, last = directory.status(), directory.last_metrics()
        accuracies = [row["accuracy"] for row in read_rows(directory.evaluations_file) if "accuracy" in row]
        before_best_last = (accuracies[0], max(accuracies), accuracies[-1]) if accuracies else ()
        accuracy_cells = [f"{value:.3f}" for value in before_best_last] or ["", "", ""]
        minutes = sum(row["seconds_step"] for row in read_rows(directory.metrics_file)) / 60
        tokens = f"{last.get('own_tokens_total', 0):,.0f}" if last else ""
        state = directory.state() or "not started"
        cells = (state, str(status.get("step", 0)), *accuracy_cells, tokens, f"{minutes:.1f}")
        table.add_row(*([name] if several else []), *cells)
    return table


def distinct_names(paths: list[Path]) -> list[str]:
    """Returns the names of the runs without the `-key=value` parts that all of them share."""
    parts = [re.split(r"-(?=[\w.@/]+=)", path.name) for path in paths]
    shared = set.intersection(*map(set, parts)) if paths else set()
    return ["-".join([first, *(part for part in rest if part not in shared)]) for first, *rest in parts]


class SweepSummary(Callback):
    """Prints the folder of a sweep before its first run, and after its last one the table and the commands that follow.

    A Hydra callback. Exits with CRASHED where a run failed.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        print(f"sweep: {shown_folder(config)}", flush=True)

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        if not config.hydra.launcher.get("wait", True):
            return  # the jobs are in the queue, and slurm.status tells of them
        jobs = load_jobs(Path(config.hydra.sweep.dir))
        print_table([Path(job.run) for job in jobs])
        failed = [job for job in jobs if job.error is not None]
        for job in failed:
            print(f"failed: {job.run}: {job.error}", file=sys.stderr)
        print(next_commands(shown_folder(config)), flush=True)
        if failed:
            sys.exit(CRASHED)


def shown_folder(config: DictConfig) -> str:
    """Returns the folder of a sweep as a user would type it: relative where it lies below the working directory."""
    folder = Path(config.hydra.sweep.dir).absolute()
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def next_commands(folder: str) -> str:
    """Returns the lines at the end of a sweep: what to type next."""
    quoted = shlex.quote(folder)
    return (
        f"report: python -m analysis.report {quoted}\n"
        f"status: python -m slurm.status {quoted}\n"
        "again: the same command resumes what ended early and skips the rest"
    )
