"""The picture of one run, which experiments/run.py leaves in its directory: light, without pandas and scipy."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from otb.records import RunDirectory, read_rows


def run_picture(directory: RunDirectory) -> Path:
    """Draws training reward, held-out accuracy and gradient norm over steps. One seed, so there is no interval.

    Returns:
        The path of learning_curve.png in the run directory.
    """
    rows = list(read_rows(directory.metrics_file))
    evaluations = [row for row in read_rows(directory.evaluations_file) if "accuracy" in row]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    scored = [row for row in rows if "reward_mean" in row]
    left.plot([row["step"] for row in scored], [row["reward_mean"] for row in scored], lw=1, label="training reward")
    left.plot(
        [row["step"] for row in evaluations], [row["accuracy"] for row in evaluations], "o-", label="held-out accuracy"
    )
    left.set(xlabel="step", ylabel="share", ylim=(0, 1))
    left.legend(loc="lower right", frameon=False)
    normed = [row for row in rows if row.get("gradient_norm", 0) > 0]  # a log axis has no 0
    right.plot([row["step"] for row in normed], [row["gradient_norm"] for row in normed], lw=1, color="tab:red")
    right.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log")
    figure.suptitle(f"{directory.path.parent.name} / {directory.path.name} (1 seed)", fontsize=9)
    path = directory.path / "learning_curve.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
