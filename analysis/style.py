"""How figures look and how they are saved: one style, fixed colours per arm, PDF + PNG + the plotted numbers as CSV."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from analysis.arms import label

plt.style.use(Path(__file__).with_name("paper.mplstyle"))
COLUMN, PAGE = 3.3, 6.8  # inches: one column of a two-column paper, and its full width
COLOURS = {
    "otb": "#D55E00",
    "otb tail=carry": "#E69F00",
    "otb_carry": "#E69F00",  # the same estimator by the name of its yaml
    "group_mean": "#000000",
    "grpo": "#0072B2",
    "rloo": "#009E73",
    "opo": "#56B4E9",
    "sequence_energy": "#CC79A7",
    "none": "#7F7F7F",
    "energy_probe": "#882255",
    "value": "#332288",
    "damped_probe": "#AA4499",
    "ob_exact": "#44AA99",
    "otb_exact": "#8C510A",
    "otb_loo": "#F4A582",
    "otb_carry_loo": "#B2A000",
    "sequence_energy_loo": "#117733",
    "trajectory_cv": "#E7298A",
}
SPARE = ("#882255", "#44AA99", "#999933", "#332288", "#DDCC77", "#117733")  # Tol's muted set, for further arms
DASHES = {0: "-", 1: "--", 2: ":", 3: "-."}
MARKERS = "osD^vP*X"


@cache
def _spare(baseline: str) -> str:
    return SPARE[sum(baseline.encode()) % len(SPARE)]


def colour(baseline: str) -> str:
    """The colour of an arm, the same in every figure."""
    return COLOURS.get(str(baseline)) or _spare(str(baseline))


def dash(size, sizes: Iterable) -> str:
    """The line style of a group size, where one figure shows several."""
    order = sorted(set(sizes))
    return DASHES[order.index(size) % len(DASHES)] if size in order else ":"


def marker(baseline: str) -> str:
    known = [*COLOURS, baseline]
    return MARKERS[known.index(baseline) % len(MARKERS)]


def arms(table: pd.DataFrame) -> list[tuple[str, float, str, pd.DataFrame]]:
    """(baseline, group size, text, rows) per arm: OTB first, then in the order of COLOURS, then by name.

    The text leaves the group size out where there is one only.
    """
    order = {name: place for place, name in enumerate(COLOURS)}
    cells = list(table.groupby(["baseline", "group_size"], observed=True, dropna=False))
    one_size = len({size for (_, size), _ in cells}) == 1
    cells.sort(key=lambda cell: (order.get(cell[0][0], len(order)), cell[0][0], cell[0][1]))
    return [(base, size, label(base, None if one_size else size), rows) for (base, size), rows in cells]


def figure(columns: int = 1, width: float = COLUMN, height: float = 2.3, **options):
    """-> (figure, axes or array of axes) in the project's style."""
    made, axes = plt.subplots(1, columns, figsize=(width, height), **options)
    return made, axes


def keep_numbers(axes, numbers: pd.DataFrame) -> None:
    """Leaves what is plotted with the figure; `save` writes it as CSV."""
    owner = axes if hasattr(axes, "figure") else np.ravel(axes)[0]
    owner.figure.plotted = numbers


def numbers(axes) -> pd.DataFrame:
    """What a figure function plotted, as `save` writes it."""
    owner = axes if hasattr(axes, "figure") else np.ravel(axes)[0]
    return owner.figure.plotted


def show(axes):
    """The figure as an image for a notebook's output; it is closed."""
    from IPython.display import Image

    made, picture = (axes if hasattr(axes, "figure") else np.ravel(axes)[0]).figure, io.BytesIO()
    made.savefig(picture, dpi=130)
    plt.close(made)
    return Image(picture.getvalue())


def save(axes, path: Path) -> list[Path]:
    """path.pdf, path.png and path.csv (the plotted numbers) -> the files. The figure is closed."""
    made = (axes if hasattr(axes, "figure") else np.ravel(axes)[0]).figure
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(path.name + ending) for ending in (".pdf", ".png", ".csv")]
    made.savefig(files[0], metadata={"CreationDate": None})
    made.savefig(files[1])
    numbers(axes).to_csv(files[2], index=False, float_format="%.8g")
    plt.close(made)
    return files
