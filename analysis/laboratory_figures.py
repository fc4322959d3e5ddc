"""Draws the tables of the variance laboratory (experiments/variance.py). Called by laboratory.py, which saves them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import colour, marker
from analysis.checks import require_columns
from analysis.style import PAGE, figure, keep_numbers

RATIOS = ("relative_noise", "over_probe")
MEASURED = [f"{name}{end}" for name in (*RATIOS, "direction_bias") for end in ("", "_low", "_high")]
NOISE = "noise / noise of rloo"
SHARES = np.linspace(0, 1, 201)[1:]


def noise(results: pd.DataFrame):
    """Draws noise-to-signal relative to rloo, one panel per group size, estimators from best to worst.

    Args:
        results: estimators.csv of a measurement.

    Returns:
        Array of axes.
    """
    require_columns(results, "estimator", "group_size", "prompts", *MEASURED[:3])
    sizes = sorted(results.group_size.unique())
    order = results.groupby("estimator").relative_noise.mean().sort_values(ascending=False).index
    _, axes = figure(len(sizes), PAGE, 0.19 * len(order) + 1.0, sharey=True, squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        part = results[results.group_size == size].set_index("estimator").reindex(order)
        for place, row in enumerate(part.itertuples()):
            ax.plot([row.relative_noise_low, row.relative_noise_high], [place, place], color=colour(row.Index), lw=1)
            ax.plot(row.relative_noise, place, marker(row.Index), color=colour(row.Index), ms=4)
        name_estimators(ax, size, order)
    axes[0, 0].figure.suptitle(subtitle(results), fontsize=7)
    axes[0, 0].figure.supxlabel(NOISE, fontsize=8)  # once: five panels have no room for five
    keep_numbers(axes[0], results)
    return axes[0]


def name_estimators(ax, size: int, order: pd.Index) -> None:
    """Labels the rows with the estimators and marks where rloo stands."""
    ax.axvline(1, color="0.6", lw=0.6, zorder=0)
    ax.set(title=f"N = {size}", yticks=range(len(order)), yticklabels=order)
    ax.set_xlim(left=0)


def bias_and_noise(results: pd.DataFrame):
    """Draws direction bias 1 - cos^2(E g, mu) against relative noise, one panel per group size.

    Args:
        results: estimators.csv of a measurement.

    Returns:
        Array of axes.
    """
    require_columns(results, "estimator", "group_size", "prompts", *MEASURED)
    sizes = sorted(results.group_size.unique())
    _, axes = figure(len(sizes), PAGE, 2.6, sharey=True, squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        for row in results[results.group_size == size].itertuples():
            y = [[row.direction_bias - row.direction_bias_low], [row.direction_bias_high - row.direction_bias]]
            style = {"color": colour(row.estimator), "marker": marker(row.estimator), "label": row.estimator}
            ax.errorbar(row.relative_noise, row.direction_bias, yerr=np.abs(y), ms=4, lw=0.7, ls="", **style)
        ax.axhline(0, color="0.6", lw=0.6, zorder=0)
        ax.set(title=f"N = {size}")
    axes[0, 0].set_ylabel("direction bias $1 - \\cos^2$")
    axes[0, -1].legend(fontsize=4.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[0, 0].figure.suptitle(subtitle(results), fontsize=7)
    axes[0, 0].figure.supxlabel(NOISE, fontsize=8)  # once: five panels have no room for five
    keep_numbers(axes[0], results)
    return axes[0]


def subtitle(results: pd.DataFrame) -> str:
    """Returns what every figure of a measurement says of it."""
    return f"one checkpoint, {int(results.prompts.iloc[0])} prompts; 95 % intervals over prompts"


def proxy(tokens: pd.DataFrame):
    """Draws the exact norm against the proxy per token, and what share of the energy the largest tokens hold.

    Args:
        tokens: tokens.parquet of a measurement.

    Returns:
        Array of axes.
    """
    require_columns(tokens, "prompt", "proxy", "exact")
    _, axes = figure(2, PAGE, 2.5)
    positive = tokens[(tokens.proxy > 0) & (tokens.exact > 0)]
    axes[0].hexbin(positive.proxy, positive.exact, xscale="log", yscale="log", bins="log", gridsize=45, cmap="Greys")
    axes[0].set(
        xlabel="proxy $w_t$",
        ylabel="exact $\\|s_t\\|^2$",
        title=f"{len(tokens):,} tokens of {tokens.prompt.nunique()} prompts",
    )
    curves = pd.DataFrame({"share_of_tokens": SHARES} | {name: held(tokens[name]) for name in ("proxy", "exact")})
    for name, line in (("proxy", "--"), ("exact", "-")):
        axes[1].plot(curves.share_of_tokens, curves[name], line, color="black", label=name)
    axes[1].set(xlabel="share of the tokens, largest first", ylabel="share of the energy", xscale="log", ylim=(0, 1))
    axes[1].legend()
    keep_numbers(axes, curves)
    return axes


def held(energy: pd.Series) -> np.ndarray:
    """Returns the share of the summed energy that the largest SHARES of the tokens hold."""
    sums = np.append(0, np.cumsum(np.sort(energy)[::-1]))
    return sums[np.round(SHARES * len(energy)).astype(int)] / sums[-1]


def side_by_side(measurements: dict[str, pd.DataFrame], sizes: tuple[int, ...]):
    """Draws the relative noise of every estimator per measurement, one panel per group size.

    Args:
        measurements: name -> estimators.csv.
        sizes: group sizes that all of them have.

    Returns:
        Array of axes.
    """
    for results in measurements.values():
        require_columns(results, "estimator", "group_size", "prompts", *MEASURED[:3])
    table = pd.concat([results.assign(measurement=name) for name, results in measurements.items()])
    order = table.groupby("estimator").relative_noise.mean().sort_values(ascending=False).index
    _, axes = figure(len(sizes), PAGE, 0.19 * len(order) + 1.4, sharey=True, squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        for place, (name, results) in enumerate(measurements.items()):
            part = results[results.group_size == size].set_index("estimator").reindex(order)
            y = np.arange(len(order)) + 0.14 * (place - (len(measurements) - 1) / 2)
            ax.hlines(y, part.relative_noise_low, part.relative_noise_high, color=f"C{place}", lw=0.8)
            text = f"{name}, {int(results.prompts.iloc[0])} prompts"
            ax.plot(part.relative_noise, y, "o", color=f"C{place}", ms=2.5, label=text)
        name_estimators(ax, size, order)
    for ax in axes[0]:
        ax.set_xlabel(NOISE)
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=6)
    keep_numbers(axes[0], table)
    return axes[0]
