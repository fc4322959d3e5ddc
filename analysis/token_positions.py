"""Draws samples: what OTB does token by token in one prompt group, and whether energy goes with reward."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.palette import BLUE, LINES, VERMILION
from analysis.runs.samples import energy, own_tokens
from analysis.runs.token_colours import background, largest
from analysis.style import COLUMN, PAGE, keep_numbers, plt
from otb.errors import RunError

SHOWN = 6  # rollouts of a group with their text; more do not fit under one picture


def group_numbers(group: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per own token: rollout, position, token, realized_energy, baseline, advantage, reward.

    The baseline is the one that the trainer kept: reward minus advantage would be wrong where advantages were scaled or
    weighted. It is NaN where an older run did not keep it.
    """
    rows = []
    for _, rollout in group.iterrows():
        advantage, tokens = np.asarray(rollout.advantages, float), own_tokens(rollout)
        if not len(tokens) == len(advantage) == len(energy(rollout)):
            raise RunError(
                f"Rollout {rollout.rollout} has {len(tokens)} own tokens and {len(advantage)} advantages: damaged."
            )
        columns = {"rollout": rollout.rollout, "position": np.arange(1, len(tokens) + 1), "token": tokens}
        columns |= {"realized_energy": energy(rollout), "advantage": advantage}
        columns |= {"baseline": rollout.get("baselines", np.nan)}
        rows.append(pd.DataFrame(columns | {"reward": rollout.reward}))
    return pd.concat(rows, ignore_index=True)


def token_positions(group: pd.DataFrame):
    """Draws realized energy, baseline and advantage over own-token position for one prompt group, its text below.

    group: of `samples.read_group`.

    Returns:
        The axes of the three curves, then those of the texts.
    """
    numbers = group_numbers(group)
    names = list(dict.fromkeys(numbers.rollout))
    with_text = shown_rollouts(numbers)
    texts = [lay_out(numbers[numbers.rollout == name]) for name in with_text]
    heights = [0.2 + 0.13 * (1 + max(line for line, *_ in text)) for text in texts]
    figure = plt.figure(figsize=(PAGE, 2.3 + sum(heights)))
    grid = figure.add_gridspec(1 + len(texts), 3, height_ratios=[2.1, *heights])
    curves = [figure.add_subplot(grid[0, place]) for place in range(3)]
    for axes, column in zip(curves, ("realized_energy", "baseline", "advantage"), strict=True):
        for place, (name, rows) in enumerate(numbers.groupby("rollout", sort=False)):
            tint, style = LINES[place % len(LINES)], "-" if rows.reward.iloc[0] > 0 else "--"
            axes.plot(rows.position, rows[column], color=tint, ls=style, lw=1, alpha=0.85, label=f"rollout {name}")
        unknown = numbers[column].isna().all()
        axes.set(xlabel="own token", title=column.replace("_", " ") + (" (not kept)" if unknown else ""))
    if len(names) <= 2 * SHOWN:
        curves[0].legend(fontsize=5.5)
    limit = largest([numbers.advantage])
    for place, (name, text) in enumerate(zip(with_text, texts, strict=True)):
        axes = figure.add_subplot(grid[1 + place, :])
        reward = numbers[numbers.rollout == name].reward.iloc[0]
        axes.set_title(
            f"rollout {name}, reward {reward:g}",
            loc="left",
            fontsize=6,
            color=LINES[names.index(name) % len(LINES)],
            pad=1,
        )
        write_tokens(axes, text, limit)
    cut = f"; texts of {len(names) - len(texts)} more rollouts not shown" if len(names) > len(texts) else ""
    legend = "dashed: reward 0; text on blue: advantage < 0, on orange: > 0"
    figure.suptitle(f"one prompt group, {len(names)} rollouts, 1 seed; {legend}{cut}", fontsize=6.5)
    keep_numbers(curves[0], numbers)
    return figure.axes


def shown_rollouts(numbers: pd.DataFrame) -> list[int]:
    """Returns the SHOWN rollouts of a group whose text is written: one of each reward in turn, in their own order."""
    first = numbers.drop_duplicates("rollout")
    turns = first.groupby("reward", dropna=False).cumcount()
    return sorted(first.rollout.iloc[np.argsort(turns, kind="stable")[:SHOWN]])


def lay_out(rows: pd.DataFrame, width: int = 118, lines: int = 6) -> list[tuple[int, int, str, float]]:
    """Places tokens, wrapped at `width` characters and cut off with a mark after `lines`.

    Returns:
        (line, column, text, advantage) per token.
    """
    placed: list[tuple[int, int, str, float]] = []
    column, line = 0, 0
    for token, advantage in zip(rows.token, rows.advantage, strict=True):
        text = token.replace("\n", "⏎")
        if column + len(text) > width and column:
            column, line = 0, line + 1
        if line == lines:
            return [*placed[:-1], (*placed[-1][:2], "…", placed[-1][3])]
        placed.append((line, column, text, advantage))
        column += len(text)
    return placed or [(0, 0, "", 0.0)]


def write_tokens(axes, placed: list[tuple[int, int, str, float]], limit: float, width: int = 118) -> None:
    """Writes tokens as `lay_out` placed them, each on the colour of its advantage; `limit` has the full colour."""
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(1 + max(line for line, *_ in placed), 0))
    for line, column, text, advantage in placed:
        colour = background(advantage, limit)
        tint = "0.6" if colour is None else [channel / 255 for channel in colour]
        axes.add_patch(plt.Rectangle((column, line + 0.05), len(text), 0.9, color=tint, lw=0))
        axes.text(column, line + 0.75, text.replace("$", r"\$"), fontsize=5.4, family="monospace")


def energy_against_reward(samples: pd.DataFrame):
    """Draws the energy of each rollout relative to its group's mean, by reward.

    OTB moves the baseline away from the group mean where energy and reward go together within a group, and cannot help
    where they do not; the title has the mean shift.

    Args:
        samples: rows of `read_samples`, of one run or of several (column `run`).

    Returns:
        The axes.
    """
    rows = group_energies(samples)
    figure, axes = plt.subplots(figsize=(COLUMN, 2.4))
    rewards = sorted(rows.reward.unique())
    jitter = np.random.default_rng(0).uniform(-0.12, 0.12, len(rows))
    place = rows.reward.map({reward: at for at, reward in enumerate(rewards)}).to_numpy()
    axes.plot(place + jitter, rows.relative_energy, ".", ms=2.5, alpha=0.4, color=BLUE)
    means = rows.groupby("reward").relative_energy.mean()
    axes.plot(range(len(rewards)), means.loc[rewards], "_", ms=26, mew=2, color=VERMILION)
    axes.axhline(1, color="0.6", lw=0.6)
    axes.set(xlabel="reward", ylabel="energy / mean energy of its group", xticks=range(len(rewards)))
    axes.set_xticklabels([f"{reward:g}" for reward in rewards])
    shift = rows.drop_duplicates("group").baseline_shift.mean()
    runs = samples.run.nunique() if "run" in samples else 1
    axes.set_title(
        f"{rows.group.nunique()} groups with unequal rewards, {runs} run{'s' if runs > 1 else ''} (seeds)\n"
        f"energy-weighted minus plain mean reward: {shift:+.3f}",
        loc="left",
        fontsize=7,
    )
    keep_numbers(axes, rows)
    return axes


def group_energies(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per rollout of the groups whose rewards differ: its energy, and how far energy moves the baseline.

    The columns are group, reward, relative_energy, energy and baseline_shift, one number per group: sum(W R) / sum(W) -
    mean(R) at the end of the rollouts.

    Raises:
        RunError: there is no such group.
    """
    keys = [key for key in ("run", "step", "prompt") if key in samples]
    rows = []
    for number, (_, group) in enumerate(samples.groupby(keys)):
        if group.reward.nunique() < 2:
            continue
        total = np.array([energy(rollout)[-1] for _, rollout in group.iterrows() if len(rollout.advantages)])
        group = group[[len(values) > 0 for values in group.advantages]]
        shift = (total * group.reward).sum() / max(total.sum(), 1e-8) - group.reward.mean()
        columns = {"group": number, "reward": group.reward.to_numpy(), "relative_energy": total / total.mean()}
        rows.append(pd.DataFrame(columns | {"energy": total, "baseline_shift": shift}))
    if not rows:
        raise RunError("No prompt group has unequal rewards: nothing to compare. Keep more groups: rollouts.groups=16.")
    return pd.concat(rows, ignore_index=True)
