"""Tabulates and draws the tokens to a target accuracy per arm, and what one arm saves against another (C4)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter

from analysis.arms import by_arm, colour, label, marker
from analysis.checks import one_setting, require
from analysis.intervals import Interval, bootstrap
from analysis.style import PAGE, dash, figure, keep_numbers, legend_below, seeds_text
from analysis.ticks import plain_log
from analysis.token_consumption import (
    PROGRESS_COLUMNS,
    consumption,
    horizon,
    log_rank,
    median_tokens,
    restricted_mean,
    saving,
)


def tokens_by_arm(table: pd.DataFrame, target: float, resamples: int = 0) -> pd.DataFrame:
    """Returns a row per arm: runs, reached, restricted mean and median tokens to the target, the horizon of the mean.

    The horizon of an arm is what it consumed. Comparisons of two arms share one, see `savings`.

    Args:
        table: rows of one setting.
        target: accuracy.
        resamples: of the interval of the mean; 0 leaves it out.
    """
    rows = []
    for baseline, size, _, runs in by_arm(one_setting(table)):
        arm = consumption(runs, target)
        limit = horizon(arm)
        mean = bootstrap(
            [np.column_stack([arm.tokens, arm.reached])],
            lambda x, limit=limit: restricted_mean(x[..., 0], x[..., 1] > 0, limit),
            bounds=(0, np.inf if arm.reached.all() else limit),
            resamples=resamples,
        )
        facts = {"baseline": baseline, "group_size": size, "runs": len(arm.seeds), "reached": int(arm.reached.sum())}
        facts |= {"mean": mean.estimate, "low": mean.low, "high": mean.high, "median": median_tokens(arm)}
        rows.append(facts | {"horizon": limit, "target": target})
    return pd.DataFrame(rows)


def savings(table: pd.DataFrame, target: float, ours: tuple[str, int], theirs: list[tuple[str, int]]) -> pd.DataFrame:
    """Returns a row per rival arm: the share of its tokens that `ours` saves, and the log-rank test's p."""
    arms = {(name, int(size)): consumption(rows, target) for name, size, _, rows in by_arm(one_setting(table))}
    rows = []
    for rival in theirs:
        interval = saving(arms[ours], arms[rival])
        facts = {"ours": label(*ours), "rival": label(*rival), "target": target, **interval._asdict()}
        rows.append(facts | {"log_rank_p": log_rank(arms[ours], arms[rival])})
    return pd.DataFrame(rows)


def token_consumption(table: pd.DataFrame, target: float):
    """Draws the tokens to a target and what OTB saves of them.

    Left: restricted mean own tokens until each accuracy up to just above the target, per arm; filled where all
    seeds reached it, hollow where some are censored. Right: saving of OTB against each rival of its group size at the
    target, in per cent, with 95 % intervals.

    Returns:
        The two axes.
    """
    require(one_setting(table), "evaluation_accuracy", "evaluation_own_tokens_total")
    columns = ["run", "step", "setting", "baseline", "group_size", "seed"]
    table = table[[*columns, *(column for column in PROGRESS_COLUMNS if column in table)]]
    start = table[table.evaluation_accuracy.notna()].sort_values("step").groupby("run", observed=True).first()
    levels = np.unique(np.append(np.linspace(start.evaluation_accuracy.mean(), min(1, target * 1.1), 9)[1:], target))
    _, (left, right) = figure(2, PAGE, 2.9)
    curves = pd.concat([tokens_by_arm(table, level) for level in levels])
    sizes = set(curves.group_size)
    for name, size, text, rows in by_arm(curves):
        tint, runs = colour(name), int(rows.runs.iloc[0])
        drawn = rows[rows.reached > 0]
        left.plot(drawn.target, drawn["mean"], color=tint, ls=dash(size, sizes), label=f"{text} ({runs})")
        for whole, fill in ((True, tint), (False, "white")):
            part = drawn[(drawn.reached == drawn.runs) == whole]
            left.plot(part.target, part["mean"], marker(name), color=tint, mfc=fill)
    left.axvline(target, color="0.6", lw=0.6, ls=":")
    left.set(
        xlabel="target accuracy (hollow: some seeds censored)", ylabel="own tokens (restricted mean)", yscale="log"
    )
    plain_log(left.yaxis, EngFormatter(sep=""))
    left.set_title(f"{seeds_text(curves.runs)} per arm", loc="left", fontsize=7)
    legend_below(left)
    against = _saving_rows(table, target)
    draw_savings(right, against)
    right.set_title(f"target accuracy {target:g}", loc="left", fontsize=7)
    keep_numbers(left, pd.concat([curves.assign(what="tokens"), against.assign(what="saving")]))
    return left, right


def _saving_rows(table: pd.DataFrame, target: float) -> pd.DataFrame:
    cells = {(base, int(size)) for base, size, *_ in by_arm(table)}
    rows = []
    for size in sorted({n for base, n in cells if base == "otb"}):
        rivals = sorted(cell for cell in cells if cell[1] == size and cell[0] != "otb")
        rows.append(savings(table, target, ("otb", size), rivals))
    columns = ["ours", "rival", "target", *Interval._fields, "log_rank_p"]
    return pd.concat([pd.DataFrame(columns=columns), *(part for part in rows if len(part))])


def draw_savings(axes, rows: pd.DataFrame) -> None:
    """Draws a line per rival: 100 * saving with its interval; no point where no run of the two reached the target."""
    if rows.empty:
        axes.text(0.5, 0.5, "no rival of OTB here", transform=axes.transAxes, ha="center")
    place = np.arange(len(rows))[::-1]
    axes.axvline(0, color="0.6", lw=0.6)
    axes.hlines(place, 100 * rows.low, 100 * rows.high, color=colour("otb"))
    axes.plot(100 * rows.estimate, place, "o", color=colour("otb"))
    names = [f"{rival} ({seeds})" for rival, seeds in zip(rows.rival, rows.seeds, strict=True)]
    axes.set(yticks=place, yticklabels=names, ylim=(-0.6, len(rows) - 0.4))
    axes.set_xlabel("tokens saved by OTB at the rival's N, per cent")
    drawn = (100 * rows[["low", "high", "estimate"]].astype(float)).clip(-150, 100).to_numpy().ravel()
    drawn = drawn[np.isfinite(drawn)]
    axes.set_xlim(min([-10, *drawn]) - 5, 105)
