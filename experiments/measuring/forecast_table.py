"""Prints a forecast: a table per group size, facts about energies, and one sentence of advice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

FEW_PROMPTS = 12  # with different rewards; with fewer the intervals are too narrow
NO_UNBIASED = "no unbiased baseline's interval lies below 1"
OFF = {False: 0.2, True: 0.4}  # with tools or not: the largest error in docs/figures/forecast.csv, rounded up
MUCH_CUT = 0.2  # share of rollouts cut at a limit from which the sentence says so


@dataclass
class Facts:
    """What is said of the rollouts, beside the forecast. cut: the share that a limit cut, None where not recorded."""

    rollouts: int
    unscored: int
    cut: float | None
    with_tools: bool
    mean_reward: float


def report(table: pd.DataFrame, room: dict, contrast: dict, facts: Facts, cfg: DictConfig) -> None:
    """Prints everything of one set of rollouts, and the sentence last.

    table: of `otb.laboratory.forecast.forecast`; room, contrast: of otb/laboratory/energies.py.
    """
    console = _console()
    for size in table.group_size.unique():
        console.print(size_table(table[table.group_size == size], int(size), cfg.prompts_per_step))
    lines = [*describe(contrast, facts), *describe_room(room)]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    first = int(table.group_size.iloc[0])
    text = advice(table[table.group_size == first], first, room, contrast, facts)
    console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)


def print_steps(tables: dict[int, pd.DataFrame], size: int) -> None:
    """Prints the forecasts of single steps, which have too few prompts for intervals."""
    names = list(next(iter(tables.values())).estimator) if tables else []
    columns = (Column(name, overflow="fold") for name in names)
    shown = Table("step", "prompts", *columns, title=f"N = {size}: forecast of noise / rloo of each kept step")
    for step, table in tables.items():
        shown.add_row(str(step), str(table.prompts.iloc[0]), *(f"{value:.2f}" for value in table.forecast))
    _console().print(shown)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=140)


def size_table(table: pd.DataFrame, size: int, prompts_per_step: int) -> Table:
    """Returns the table of one group size, sorted by the forecast."""
    title = f"N = {size}: forecast of noise / rloo, {int(table.prompts.iloc[0])} prompts, 95 % intervals over prompts"
    caption = f"rloo prompts: how many rloo needs for the noise of {prompts_per_step} prompts of the estimator"
    columns = ("noise / rloo", "self-inclusion", "scale", "unbiased", "rloo prompts")
    shown = Table(Column("estimator", no_wrap=True), *columns, title=title, caption=caption)
    for row in table.sort_values("forecast").itertuples():
        cells = [
            f"{row.forecast:.2f} {interval(row.forecast_low, row.forecast_high)}",
            "" if math.isnan(row.self_inclusion) else f"{row.self_inclusion:.0%}",
            f"{row.scale:.2f}",
            {True: "yes", False: "no"}.get(row.unbiased, "no claim"),
            "" if math.isnan(row.forecast) else f"{prompts_per_step / row.forecast:.0f}",
        ]
        shown.add_row(row.estimator, *cells)
    return shown


def interval(low: float, high: float) -> str:
    """Returns "[low, high]", "unknown" for NaN."""
    return "unknown" if math.isnan(low) else f"[{low:.2f}, {high:.2f}]"


def describe(contrast: dict, facts: Facts) -> list[str]:
    """Returns lines about the rollouts and where they spend energy."""
    cut = "" if facts.cut is None else f", {facts.cut:.0%} cut at a limit"
    unscored = f", {facts.unscored} unscored" if facts.unscored else ""
    lines = [f"rollouts: {facts.rollouts}, mean reward {facts.mean_reward:.2f}{cut}{unscored}"]
    ratio = f"{contrast['ratio']:.2f} {interval(contrast['ratio_low'], contrast['ratio_high'])}"
    lines.append(
        f"energy W_T, {contrast['prompts']} prompts with different rewards: above the prompt's mean reward "
        f"{contrast['above']:.3g}, below {contrast['below']:.3g}, ratio {ratio}"
    )
    for side in ("above", "below"):
        fifths = ", ".join(f"{value:.3g}" for value in contrast[f"{side}_fifths"])
        lines.append(f"energy in each fifth of a response, {side} the mean reward: {fifths}")
    correlations = (f"with the {name} {contrast[f'with_{name}']:.2f}" for name in ("reward", "length"))
    return [*lines, f"correlation of W_T within a prompt: {', '.join(correlations)}"]


def describe_room(room: dict) -> list[str]:
    """Returns a line about the headroom of the token form."""
    if not room:
        return ["headroom: unknown, as no prompt has 16 scored rollouts and different rewards"]
    gain = f"{room['token_gain']:.1%} [{room['token_gain_low']:.1%}, {room['token_gain_high']:.1%}]"
    return [
        f"headroom, cross-fitted: the best single number has {room['number']:.2f} of the mean's energy, the best "
        f"function of t {room['token']:.2f} ({room['pieces']} pieces); the token form gains {gain}, and "
        f"{room['token_gain_most']:.1%} where it is fitted and judged on the same rollouts"
    ]


# ---- the sentence


def advice(table: pd.DataFrame, size: int, room: dict, contrast: dict, facts: Facts) -> str:
    """Returns one sentence: which baseline to take at this N, what it gains, and where not to trust it."""
    better = table[(table.forecast_high < 1) & (table.estimator != "rloo")].sort_values("forecast")
    if better.empty:
        parts = [f"At N = {size} keep rloo, as no other baseline's interval lies below 1"]
    else:
        parts = [f"At N = {size} take {named(better.iloc[0])}"]
        unbiased = better[[claim is True for claim in better.unbiased]]
        if better.iloc[0].unbiased is not True:
            parts.append(f"the best unbiased one is {named(unbiased.iloc[0])}" if len(unbiased) else NO_UNBIASED)
    *first, last = caveats(contrast, facts)
    return "; ".join([*parts, token_form(room), f"this forecast {', '.join(first)}, and {last}."])


def named(row) -> str:
    """Returns an estimator with its forecast, and how much of its gain is self-inclusion."""
    text = f"{row.estimator} with {row.forecast:.2f} {interval(row.forecast_low, row.forecast_high)} of rloo's noise"
    lost = min(max(row.self_inclusion, 0), 1)
    return text if math.isnan(row.self_inclusion) else f"{text} ({lost:.0%} of that gain is self-inclusion)"


def token_form(room: dict) -> str:
    """Returns what a baseline per token could add to one number per prompt."""
    if not room:
        return "what a baseline per token could add is unknown from so few rollouts a prompt"
    found, most = (max(0.0, room[name]) for name in ("token_gain", "token_gain_most"))
    return f"a baseline per token could add about {found:.0%} to what one number gains, at the very most {most:.0%}"


def caveats(contrast: dict, facts: Facts) -> list[str]:
    """Returns what follows "this forecast": where not to trust it on these rollouts."""
    found = [f"was off by up to {OFF[facts.with_tools]:.0%} where it was checked{' with tools' * facts.with_tools}"]
    if contrast["prompts"] < FEW_PROMPTS:
        found.append(f"rests on only {contrast['prompts']} prompts with different rewards")
    if facts.cut is not None and facts.cut > MUCH_CUT:
        found.append(f"is about rollouts of which {facts.cut:.0%} were cut at a limit")
    return [*found, "does not see the bias of a direction"]
