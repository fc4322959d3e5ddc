"""Draws how the chance to end right moves along rollouts. study/scripts/prefix_values.py measures it."""

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

    table: prompt, rollout, length, reward, position, value (the mean reward of a prefix's continuations), value_error
        (its standard error).

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
    right.set(xlabel="share of the rollout", ylabel="explained variance of R", ylim=(-0.55, 1.05))
    counts = table.drop_duplicates(["prompt", "rollout"])
    left.set_title(
        f"{task}: one rollout of each of {shown.prompt.nunique()} prompts, {DRAWN} at most", loc="left", fontsize=7
    )
    about = f"{len(counts)} rollouts of {table.prompt.nunique()} prompts; band: 95 % over prompts"
    right.set_title(about, loc="left", fontsize=7)
    keep_numbers((left, right), table)
    return left


def explained_variance(table: pd.DataFrame, parts: int = 16) -> pd.DataFrame:
    """Returns the share of the variance of R that V explains at each share of the rollouts, with its 95 % interval.

    It is 1 - mean (R - V)^2 / variance of R, with the noise of V taken off. Intervals are over prompts, as the rollouts
    of one prompt are no independent samples.

    Returns:
        share, explained, low, high.
    """
    share = (table.position / table.length * parts).round() / parts
    missed = (table.reward - table.value) ** 2 - table.value_error**2
    sums = pd.DataFrame({"n": 1, "missed": missed, "reward": table.reward, "squared": table.reward**2})
    found = []
    for at, of_share in sums.groupby(share):
        ends = bootstrap([of_share.groupby(table.prompt).sum().to_numpy()], explained_by)
        found.append({"share": at, "explained": ends.estimate, "low": ends.low, "high": ends.high})
    return pd.DataFrame(found)


def explained_by(sums: NDArray) -> NDArray:
    """Returns the explained share of the variance of R. sums: (prompts, ..., 4), as `explained_variance` makes them."""
    n, missed, reward, squared = np.moveaxis(sums.sum(axis=0), -1, 0)
    variance = squared / n - (reward / n) ** 2
    return 1 - missed / n / np.where(variance > 0, variance, np.nan)
