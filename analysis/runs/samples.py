"""Reads the samples of a run, rollouts/*.parquet: prompt groups with tokens, rewards, energies and advantages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from otb.errors import RunError
from otb.records import RunDirectory, sample_step


def sample_steps(run: str | Path) -> list[int]:
    """Lists the steps at which a run kept samples."""
    return sorted(sample_files(run))


def sample_files(run: str | Path, failed: bool = False) -> dict[int, list[Path]]:
    """Returns step -> files of its samples.

    failed: also include the rollouts of failed steps, which each process wrote to its own file.
    """
    files: dict[int, list[Path]] = {}
    for file in sorted(RunDirectory(run).rollouts.glob("*.parquet" if failed else "step-*.parquet")):
        files.setdefault(sample_step(file), []).append(file)
    return files


def read_samples(run: str | Path, step: int | None = None, failed: bool = False) -> pd.DataFrame:
    """Reads a row per rollout of one kept step, the last by default.

    Args:
        run: the run directory.
        step: a kept step; None for the last one.
        failed: whether the rollouts of failed steps count too.

    Raises:
        RunError: the run kept none of that step, with the steps there are; or it is no run directory.
    """
    directory, files = RunDirectory(run), sample_files(run, failed)
    if not files and not directory.config_file.exists():
        nearby = sorted(config.parent for config in directory.path.glob("**/config.yaml"))
        hint = nearby[0] if nearby else "the directory that the run printed at its end"
        raise RunError(f"{directory.path} is no run directory: it has no config.yaml. Try {hint}.")
    if not files:
        raise RunError(f"{directory.path} has kept no rollouts. Set rollouts.every=20 and run again.")
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise RunError(f"step={step} has no samples in {directory.path}; kept: {', '.join(map(str, sorted(files)))}.")
    return pd.concat([pd.read_parquet(file) for file in files[chosen]], ignore_index=True)


def select_group(samples: pd.DataFrame, prompt: int | None = None) -> pd.DataFrame:
    """Returns the rollouts of one prompt group, in order.

    Args:
        samples: rows of `read_samples`.
        prompt: its number; None for the first group whose rewards differ, else the first group.

    Raises:
        RunError: there is no such prompt, with the prompts there are.
    """
    if prompt is None:
        spread = samples.groupby("prompt").reward.agg(lambda rewards: rewards.max() - rewards.min())
        prompt = spread[spread > 0].index[0] if (spread > 0).any() else spread.index[0]
    group = samples[samples.prompt == prompt]
    if group.empty:
        kept = ", ".join(map(str, sorted(samples.prompt.unique())))
        raise RunError(f"prompt={prompt} is not among the kept prompt groups; kept: {kept}.")
    return group.sort_values("rollout", kind="stable")


def read_group(run: str | Path, step: int | None = None, prompt: int | None = None) -> pd.DataFrame:
    """Reads the rollouts of one prompt group; arguments as in `read_samples` and `select_group`.

    Without a step and a prompt: of the last kept step that has a group whose rewards differ, else of the last one.
    """
    for kept in reversed(sample_files(run)) if step is None and prompt is None else ():
        group = select_group(read_samples(run, kept))
        if group.reward.nunique() > 1:
            return group
    return select_group(read_samples(run, step), prompt)


def own_tokens(rollout: pd.Series) -> list[str]:
    """Returns the text of the tokens that the policy sampled, one for each energy and advantage."""
    return [token for token, own in zip(rollout.tokens, rollout.own, strict=True) if own]


def has_energy(rollout: pd.Series) -> bool:
    """Tells whether the run recorded this rollout's energies; parquet leaves None or NaN where it did not."""
    return np.ndim(rollout.energies) > 0


def energy(rollout: pd.Series) -> NDArray:
    """Returns the realized energy W_t per own token. Raises RunError where the run did not record it."""
    if not has_energy(rollout):
        raise RunError("These samples hold no energies: their baseline needs none. Run again with log_energy=true.")
    return np.asarray(rollout.energies, float)
