"""Figures of the variance laboratory (experiments/variance.py), functions of its tables; `draw_all` saves them.

`python -m analysis.laboratory FOLDER...` puts several measurements side by side: checkpoints, tasks, LoRA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.style import PAGE, colour, figure, keep_numbers, marker, save
from otb.errors import RunError

RATIOS = ("relative_noise", "over_probe")
MEASURED = [f"{name}{end}" for name in (*RATIOS, "direction_bias") for end in ("", "_low", "_high")]
NOISE = "noise / noise of rloo"
SHOWN = (4, 32)  # group sizes, where they were measured
SHARES = np.linspace(0, 1, 201)[1:]


def require(table: pd.DataFrame, *columns: str) -> None:
    """Raises RunError where a table lacks a column that is to be drawn."""
    if missing := [column for column in columns if column not in table]:
        raise RunError(
            f"The measurement has no {', '.join(missing)}. Run experiments/variance.py again: it writes its tables "
            "anew and measures nothing twice."
        )


def draw_all(results: pd.DataFrame, tokens: pd.DataFrame, folder: Path) -> list[Path]:
    files = save(noise(results), folder / "noise")
    files += save(bias_and_noise(results), folder / "bias")
    return files + save(proxy(tokens), folder / "proxy")


def noise(results: pd.DataFrame):
    """Noise-to-signal relative to rloo, one panel per group size, estimators from best to worst. -> array of axes."""
    require(results, "estimator", "group_size", "prompts", *MEASURED[:3])
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
    """A row per estimator, and where rloo stands."""
    ax.axvline(1, color="0.6", lw=0.6, zorder=0)
    ax.set(title=f"N = {size}", yticks=range(len(order)), yticklabels=order)
    ax.set_xlim(left=0)


def bias_and_noise(results: pd.DataFrame):
    """Direction bias 1 - cos^2(E g, mu) against relative noise, one panel per group size. -> array of axes."""
    require(results, "estimator", "group_size", "prompts", *MEASURED)
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
    return f"one checkpoint, {int(results.prompts.iloc[0])} prompts; 95 % intervals over prompts"


def proxy(tokens: pd.DataFrame):
    """Exact norm against proxy per token, and what share of the energy the largest tokens hold. -> array of axes."""
    require(tokens, "prompt", "proxy", "exact")
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
    """Share of the summed energy that the largest SHARES of the tokens hold."""
    sums = np.append(0, np.cumsum(np.sort(energy)[::-1]))
    return sums[np.round(SHARES * len(energy)).astype(int)] / sums[-1]


def side_by_side(measurements: dict[str, pd.DataFrame], sizes: tuple[int, ...]):
    """Relative noise of every estimator per measurement, one panel per group size. -> array of axes."""
    for results in measurements.values():
        require(results, "estimator", "group_size", "prompts", *MEASURED[:3])
    table = pd.concat([results.assign(measurement=name) for name, results in measurements.items()])
    order = table.groupby("estimator").relative_noise.mean().sort_values(ascending=False).index
    _, axes = figure(len(sizes), PAGE, 0.19 * len(order) + 1.4, sharey=True, squeeze=False)
    for ax, size in zip(axes[0], sizes, strict=True):
        for place, (name, results) in enumerate(measurements.items()):
            part = results[results.group_size == size].set_index("estimator").reindex(order)
            y = np.arange(len(order)) + 0.14 * (place - (len(measurements) - 1) / 2)
            ax.hlines(y, part.relative_noise_low, part.relative_noise_high, color=f"C{place}", lw=0.8)
            label = f"{name}, {int(results.prompts.iloc[0])} prompts"
            ax.plot(part.relative_noise, y, "o", color=f"C{place}", ms=2.5, label=label)
        name_estimators(ax, size, order)
    for ax in axes[0]:
        ax.set_xlabel(NOISE)
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=6)
    keep_numbers(axes[0], table)
    return axes[0]


def markdown(results: pd.DataFrame, sizes: tuple[int, ...]) -> str:
    """Noise relative to rloo with its interval, over energy_probe's, and the direction bias, per group size."""
    order = results[results.group_size == sizes[0]].sort_values("relative_noise").estimator
    cells = results.set_index(["estimator", "group_size"])
    head = [f"N={size} {column}" for size in sizes for column in ("noise / rloo", "/ energy_probe", "1 - cos^2")]
    lines = [f"| estimator | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name in order:
        shown = []
        for size in sizes:
            row = cells.loc[name, size]
            shown += [f"{row[c]:.2f} [{row[f'{c}_low']:.2f}, {row[f'{c}_high']:.2f}]" for c in RATIOS]
            shown.append(f"{row.direction_bias:.3f} [{row.direction_bias_low:.3f}, {row.direction_bias_high:.3f}]")
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def names(folders: list[Path]) -> list[str]:
    """TASK-MODEL[-STEP], with the digest of the measurement where two would be called the same."""
    short = [folder.resolve().name.rpartition("-")[0] for folder in folders]
    return [
        folder.resolve().name if short.count(name) > 1 else name for folder, name in zip(folders, short, strict=True)
    ]


def main(folders: list[Path]) -> None:
    """Tables of each folder on standard output; one figure of all, laboratory.png, beside the first folder.

    Raises RunError for what is no measurement, and for measurements without a group size in common.
    """
    if not folders:
        raise RunError("Which measurements? Give folders: python -m analysis.laboratory runs/variance/*")
    if lacking := [str(folder) for folder in folders if not (folder / "estimators.csv").is_file()]:
        raise RunError(f"{', '.join(lacking)}: no estimators.csv. Give folders of finished experiments/variance.py.")
    tables = [pd.read_csv(folder / "estimators.csv") for folder in folders]
    for results in tables:
        require(results, "estimator", "group_size", "prompts", *MEASURED)
    measurements = dict(zip(names(folders), tables, strict=True))
    sizes = sorted(set.intersection(*(set(results.group_size) for results in tables)))
    if not sizes:
        raise RunError("The measurements have no group size in common. Measure again with the same group_sizes.")
    ends = SHOWN if set(SHOWN) <= set(sizes) else tuple(dict.fromkeys((sizes[0], sizes[-1])))
    for name, results in measurements.items():
        print(f"### {name}, {int(results.prompts.iloc[0])} prompts\n\n{markdown(results, ends)}\n")
    for file in save(side_by_side(measurements, ends), folders[0].parent / "laboratory"):
        print(file, file=sys.stderr)  # the tables alone can be redirected


if __name__ == "__main__":
    try:
        main([Path(folder) for folder in sys.argv[1:]])
    except RunError as error:
        sys.exit(f"error: {error}")
