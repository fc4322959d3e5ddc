"""Samples of a run: prompt groups with tokens, rewards, energies and advantages; read from rollouts/*.parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from otb.errors import RunError
from otb.records import RunDirectory, sample_step


def sample_steps(run: str | Path) -> list[int]:
    """Steps at which a run kept samples."""
    return sorted({sample_step(file) for file in RunDirectory(run).rollouts.glob("step-*.parquet")})


def read_samples(run: str | Path, step: int | None = None) -> pd.DataFrame:
    """A row per rollout of one kept step, the last by default. Raises RunError where the run kept none."""
    steps = sample_steps(run)
    if not steps or (step is not None and step not in steps):
        what = f"step {step}; it has {steps}" if steps else "any step. Set rollouts.every=20 and run again"
        raise RunError(f"{run} kept no samples of {what}.")
    return pd.read_parquet(RunDirectory(run).rollouts / f"step-{steps[-1] if step is None else step:08d}.parquet")


def read_group(run: str | Path, step: int | None = None, prompt: int | None = None) -> pd.DataFrame:
    """The rollouts of one prompt group. prompt: None takes the first group whose rewards differ, else the first."""
    samples = read_samples(run, step)
    if prompt is None:
        spread = samples.groupby("prompt").reward.agg(lambda rewards: rewards.max() - rewards.min())
        prompt = spread[spread > 0].index[0] if (spread > 0).any() else spread.index[0]
    group = samples[samples.prompt == prompt]
    if group.empty:
        kept = ", ".join(str(found) for found in sorted(samples.prompt.unique()))
        raise RunError(f"{run} kept the prompts {kept} at this step; {prompt} is not one of them.")
    return group


def own_tokens(rollout: pd.Series) -> list[str]:
    """Text of the tokens that the policy sampled, tool tokens left out: in step with energies and advantages."""
    return [token for token, own in zip(rollout.tokens, rollout.own, strict=True) if own]


def energy(rollout: pd.Series) -> NDArray:
    """Realized energy W_t per own token. Raises RunError where the run did not record it."""
    if rollout.energies is None:
        raise RunError("These samples hold no energies: their baseline needs none. Run again with log_energy=true.")
    return np.asarray(rollout.energies, float)
