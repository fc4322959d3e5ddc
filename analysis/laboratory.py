"""python -m analysis.laboratory FOLDER...: prints measurements of experiments/variance.py as tables and draws them.

Several folders (checkpoints, tasks, LoRA) stand side by side in one figure. With `--front FILE.png` one folder becomes
the figure of the front page instead. experiments/measuring/variance_table.py calls `draw_all`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
import yaml

from analysis.checks import require_columns
from analysis.front_figure import front_figure
from analysis.laboratory_figures import MEASURED, RATIOS, bias_and_noise, noise, proxy, side_by_side
from analysis.style import save
from otb.errors import RunError

ENDS = (4, 32)  # group sizes of tables and of figures of several measurements, where they were measured


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for what is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.laboratory", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folders", type=Path, nargs="*", help="measurements, such as runs/variance/*")
    parser.add_argument("--front", type=Path, metavar="FILE.png", help="draw the front page's figure of one folder")
    options = parser.parse_args(arguments)
    try:
        if options.front is None:
            compare(options.folders)
        else:
            draw_front(options.folders, options.front)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(folders: list[Path]) -> None:
    """Prints the tables of each folder; one figure of all, laboratory.png, goes beside the first folder.

    Raises:
        RunError: a folder is no measurement, or they have no group size in common.
    """
    tables = [read_results(folder) for folder in measurements_in(folders)]
    named = dict(zip(names(folders), tables, strict=True))
    sizes = sorted(set.intersection(*(set(results.group_size) for results in tables)))
    if not sizes:
        raise RunError("The measurements have no group size in common. Measure again with the same group_sizes.")
    ends = ENDS if set(ENDS) <= set(sizes) else tuple(dict.fromkeys((sizes[0], sizes[-1])))
    for name, results in named.items():
        print(f"### {name}, {int(results.prompts.iloc[0])} prompts\n\n{markdown(results, ends)}\n")
    for file in save(side_by_side(named, ends), folders[0].parent / "laboratory"):
        print(file, file=sys.stderr)  # the tables alone can be redirected


def draw_front(folders: list[Path], picture: Path) -> None:
    """Writes the figure of the front page as a picture and its numbers as CSV beside it.

    Raises:
        RunError: not one folder, no measurement, a file that is no .png, or a group size is missing.
    """
    if len(folders) != 1 or picture.suffix != ".png":
        raise RunError("The front page's figure is of one folder, a PNG: FOLDER --front docs/figures/noise.png")
    (folder,) = measurements_in(folders)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf8"))
    task, _, model = names([folder])[0].partition("-")
    axes = front_figure(read_results(folder), f"{model} policy on {task}", int(config["samples"]), ENDS)
    for file in save(axes, picture.with_suffix(""), ("png",)):
        print(file, file=sys.stderr)


def measurements_in(folders: list[Path]) -> list[Path]:
    """Returns `folders`. Raises RunError where there is none, or one is no finished measurement."""
    if not folders:
        raise RunError("Which measurements? Give folders: python -m analysis.laboratory runs/variance/*")
    if lacking := [str(folder) for folder in folders if not (folder / "estimators.csv").is_file()]:
        raise RunError(f"{', '.join(lacking)}: no estimators.csv. Give folders of finished experiments/variance.py.")
    return folders


def read_results(folder: Path) -> pd.DataFrame:
    """Reads estimators.csv: a row per estimator and group size. Raises RunError where a column is missing."""
    results = pd.read_csv(folder / "estimators.csv")
    require_columns(results, "estimator", "group_size", "prompts", *MEASURED)
    return results


def names(folders: list[Path]) -> list[str]:
    """Returns TASK-MODEL[-STEP], with the digest of the measurement where two would have one name."""
    short = [folder.resolve().name.rpartition("-")[0] for folder in folders]
    return [
        folder.resolve().name if short.count(name) > 1 else name for folder, name in zip(folders, short, strict=True)
    ]


def markdown(results: pd.DataFrame, sizes: tuple[int, ...]) -> str:
    """Returns noise relative to rloo with its interval, over energy_probe's, and the direction bias, per group size."""
    order = results[results.group_size == sizes[0]].sort_values("relative_noise").estimator
    cells = results.set_index(["estimator", "group_size"])
    head = [f"N={size} {column}" for size in sizes for column in ("noise / rloo", "/ energy_probe", "1 - cos^2")]
    lines = [f"| estimator | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name in order:
        texts = []
        for size in sizes:
            row = cells.loc[name, size]
            texts += [f"{row[c]:.2f} [{row[f'{c}_low']:.2f}, {row[f'{c}_high']:.2f}]" for c in RATIOS]
            texts.append(f"{row.direction_bias:.3f} [{row.direction_bias_low:.3f}, {row.direction_bias_high:.3f}]")
        lines.append(f"| `{name}` | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw_all(results: pd.DataFrame, tokens: pd.DataFrame, folder: Path) -> list[Path]:
    """Saves the figures of one measurement and returns the files.

    Args:
        results: estimators.csv.
        tokens: tokens.parquet.
        folder: where the files go.
    """
    figures = {"noise": noise(results), "bias": bias_and_noise(results), "proxy": proxy(tokens)}
    return [file for name, axes in figures.items() for file in save(axes, folder / name)]


if __name__ == "__main__":
    sys.exit(main())
