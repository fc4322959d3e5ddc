"""The picture of one run, which experiments/run.py leaves in its directory: light, without pandas and scipy."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from analysis.palette import BLUE, VERMILION
from analysis.ticks import plain_log, whole_numbers
from otb.records import RunDirectory, read_rows


def run_picture(directory: RunDirectory) -> Path:
    """Draws training reward, held-out accuracy and gradient norm over steps. One seed, so there is no interval.

    Returns:
        The path of learning_curve.png in the run directory.
    """
    rows = list(read_rows(directory.metrics_file))
    evaluations = [row for row in read_rows(directory.evaluations_file) if "accuracy" in row]
    scored = [row for row in rows if "reward_mean" in row]
    normed = [row for row in rows if row.get("gradient_norm", 0) > 0]  # a log axis has no 0
    with plt.style.context(Path(__file__).with_name("paper.mplstyle")):
        figure, (left, right) = plt.subplots(1, 2, figsize=(6.75, 2.5))
        _draw(left, scored, "reward_mean", color=BLUE, alpha=0.6, lw=0.9, label="training reward")
        _draw(left, evaluations, "accuracy", color=VERMILION, marker="o", label="held-out accuracy")
        left.set(xlabel="step", ylabel="share", ylim=(0, 1.02))
        left.legend(loc="lower right")
        _draw(right, normed, "gradient_norm", color=BLUE, lw=0.9)
        right.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log")
        plain_log(right.yaxis)
        for axes in (left, right):
            whole_numbers(axes.xaxis)
        figure.suptitle(f"{directory.path.parent.name} / {directory.path.name} (1 seed)", fontsize=8)
        path = directory.path / "learning_curve.png"
        figure.savefig(path, dpi=200)
        plt.close(figure)
    return path


def _draw(axes, rows: list[dict], metric: str, **style) -> None:
    axes.plot([row["step"] for row in rows], [row[metric] for row in rows], **style)
