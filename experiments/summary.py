"""The table at the end of a run or a sweep. Reads run directories only."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from otb.records import RunDirectory, read_rows


def summary_table(paths: list[Path]) -> Table:
    """One row per run: state, steps, held-out accuracy before, best and last, own tokens, time of the steps."""
    table = Table(
        "run" if len(paths) > 1 else "", "state", "steps", "accuracy before", "best", "last", "own tokens", "minutes"
    )
    for path in paths:
        directory = RunDirectory(path)
        status, last = directory.status(), directory.last_metrics()
        accuracies = [row["accuracy"] for row in read_rows(directory.evaluations_file) if "accuracy" in row]
        key_values = (accuracies[0], max(accuracies), accuracies[-1]) if accuracies else ()
        shown = [f"{value:.3f}" for value in key_values] or ["", "", ""]
        minutes = sum(row["seconds_step"] for row in read_rows(directory.metrics_file)) / 60
        tokens = f"{last['own_tokens_total']:,.0f}" if last else ""
        state = status.get("state", "not started")
        table.add_row(path.name, state, str(status.get("step", 0)), *shown, tokens, f"{minutes:.1f}")
    return table


class SweepSummary(Callback):
    """Hydra callback: the table of a sweep after its last run; exit status 1 where a run failed.

    Each job leaves its run directory in a file of the sweep's own folder: jobs of a sweep run in other processes.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        folder = Path(config.hydra.sweep.dir)
        paths = [Path(file.read_text()) for file in sorted(folder.glob("job-*.txt"))]
        if not paths:
            return
        Console(soft_wrap=True).print(summary_table(paths))
        failed = [path for path in paths if RunDirectory(path).status().get("state") != "finished"]
        for path in failed:
            reason = RunDirectory(path).status().get("error", "see its messages above")
            print(f"failed: {path}: {reason}", file=sys.stderr)
        if failed:
            sys.exit(1)
