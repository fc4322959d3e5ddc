"""Lists the figures of a report that read samples from disk: one prompt group token by token, energy against reward."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.arms import label
from analysis.report.drawing import Figure
from analysis.runs.load import Runs
from analysis.runs.samples import read_group, read_samples, sample_files
from analysis.token_positions import energy_against_reward, token_positions
from otb.errors import RunError

RUNS_WITH_SAMPLES = 200  # of which energy is compared with reward


def sample_figures(loaded: Runs, table: pd.DataFrame) -> Iterator[Figure]:
    """Yields one prompt group of an OTB run token by token, and energy against reward over the samples of all."""
    ours = table[table.baseline == "otb"]
    runs = list(ours.run.astype(str).unique())
    name = run_of_a_mixed_group(loaded, runs) if runs else "an OTB run, of which there is none"
    files = (files_of_samples(loaded, runs),)
    yield Figure(
        "token_positions",
        f"What OTB does in one prompt group of {name}: realized energy, baseline and advantage over own tokens.",
        files,
        lambda: token_positions(read_group(_directory(loaded, [name] if runs else []))),
    )
    yield Figure(
        "energy_against_reward",
        f"Energy of a rollout relative to its group by reward, over the last samples of {label('otb')}'s runs: OTB can "
        "help where the two go together.",
        files,
        lambda: energy_against_reward(all_samples(loaded, runs)),
    )


def run_of_a_mixed_group(loaded: Runs, runs: list[str]) -> str:
    """Returns the first run that kept a prompt group whose rewards differ, else the first one.

    Where all rewards are equal every advantage is 0, and nothing can be seen. runs: names, at least one.
    """
    for run in runs[:RUNS_WITH_SAMPLES]:
        try:
            if read_group(loaded.directory(run)).reward.nunique() > 1:
                return run
        except RunError:  # a run without samples
            continue
    return runs[0]


def _directory(loaded: Runs, runs: list[str]):
    if not runs:
        raise RunError("No finished run of OTB. Run: python experiments/run.py baseline=otb")
    return loaded.directory(runs[0])


def files_of_samples(loaded: Runs, runs: list[str]) -> pd.DataFrame:
    """Returns a row per file of the last samples of runs: its path and when it was written."""
    kept = [sample_files(loaded.directory(run)) for run in runs[:RUNS_WITH_SAMPLES]]
    files = [file for of_run in kept if of_run for file in of_run[max(of_run)]]
    return pd.DataFrame({"file": map(str, files), "written": [file.stat().st_mtime_ns for file in files]})


def all_samples(loaded: Runs, runs: list[str]) -> pd.DataFrame:
    """Reads the last samples of runs, by name, with the column `run`; of `RUNS_WITH_SAMPLES` runs at most."""
    _directory(loaded, runs)
    parts = []
    for run in runs[:RUNS_WITH_SAMPLES]:
        try:
            parts.append(read_samples(loaded.directory(run)).assign(run=run))
        except RunError:  # a run without samples; where all lack them, the last line says so
            continue
    return pd.concat(parts) if parts else read_samples(loaded.directory(runs[0]))
