"""Draws how the chance to end right moves along rollouts. experiments/prefix_values.py measures it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.intervals import bootstrap
from analysis.style import PAGE, figure, keep_numbers

DRAWN = 8  # rollouts, half of them right
RIGHT, WRONG = "#0072B2", "#D55E00"


def draw(table: pd.DataFrame, task: str):
    """Draws V along single rollouts, and beside it the share of the reward's variance that prefixes explain.

    table: prompt, rollout, length, reward, position, value: the mean reward of a prefix's continuations.

    Returns:
        The axes.
    """
    drawn, (left, right) = figure(2, width=PAGE, height=2.4)
    one_each = table.drop_duplicates("prompt").index  # of different prompts
    first = table.loc[one_each, ["prompt"]].assign(rollout=0)
    shown = table.merge(first, on=["prompt", "rollout"])
    for reward, colour in ((1.0, RIGHT), (0.0, WRONG)):
        rollouts = [part for _, part in shown[shown.reward == reward].groupby("prompt")][: DRAWN // 2]
        for number, part in enumerate(rollouts):
            name = {0: "ends right" if reward else "ends wrong"}.get(number)
            left.plot(part.position, part.value, color=colour, lw=0.9, label=name)
            left.plot([part.length.iloc[0]], [reward], "o", ms=3, color=colour)
    left.set(xlabel="own tokens", ylabel="V of the prefix", ylim=(-0.05, 1.05))
    left.legend()
    explained = explained_variance(table)
    right.plot(explained.share, explained.explained, color="#000000")
    right.fill_between(explained.share, explained.low, explained.high, color="#000000", alpha=0.15, lw=0)
    right.axhline(0, color="0.6", lw=0.8, zorder=0)
    right.set(xlabel="share of the rollout", ylabel="explained variance of R", ylim=(-1.05, 1.05))
    counts = table.drop_duplicates(["prompt", "rollout"])
    left.set_title(
        f"{task}: one rollout of each of {shown.prompt.nunique()} prompts, {DRAWN} at most", loc="left", fontsize=7
    )
    right.set_title(f"{len(counts)} rollouts of {table.prompt.nunique()} prompts", loc="left", fontsize=7)
    keep_numbers((left, right), table)
    return left


def explained_variance(table: pd.DataFrame, parts: int = 16) -> pd.DataFrame:
    """Returns 1 - mean (R - V)^2 / variance of R at each share of the rollouts, with its 95 % interval over rollouts.

    V is a mean of few continuations, whose noise lowers it: below 0 where prefixes explain nothing.

    Returns:
        share, explained, low, high.
    """
    share = (table.position / table.length * parts).round() / parts
    found = []
    for at, part in table.groupby(share):
        rollouts = part[["reward", "value"]].to_numpy()
        ends = bootstrap([rollouts], explained_by)
        found.append({"share": at, "explained": ends.estimate, "low": ends.low, "high": ends.high})
    return pd.DataFrame(found)


def explained_by(rollouts: NDArray) -> NDArray:
    """Returns the share of the variance of R that V explains. rollouts: (rollouts, ..., 2), R and V."""
    rewards, values = rollouts[..., 0], rollouts[..., 1]
    variance = rewards.var(axis=0)
    return 1 - np.square(rewards - values).mean(axis=0) / np.where(variance > 0, variance, np.nan)
