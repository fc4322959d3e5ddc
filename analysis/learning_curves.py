"""Learning curves over steps and over tokens. `run_picture` is left in every run directory by experiments/run.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from otb.records import RunDirectory, read_rows

if TYPE_CHECKING:
    import pandas as pd

AXIS_NAMES = {
    "step": "step",
    "own_tokens_total": "own tokens sampled",
    "evaluation_accuracy": "held-out accuracy (avg@k)",
    "evaluation_pass_at_k": "held-out pass@k",
    "evaluation_reward_mean": "held-out reward",
    "accuracy": "training accuracy",
    "reward_mean": "training reward",
    "gradient_norm": "gradient norm",
    "total_power": r"$\sum_t w_t A_t^2$ per rollout",
    "entropy": "entropy (nats)",
    "response_length_mean": "own tokens per rollout",
}


def run_picture(directory: RunDirectory) -> Path:
    """learning_curve.png of one run: training reward, held-out accuracy and gradient norm. One seed, so no interval."""
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


def learning_curves(
    table: pd.DataFrame, y: str = "evaluation_accuracy", x: str = "step", outside: pd.DataFrame | None = None
):
    """y over x per arm: every seed as a thin line, the interquartile mean and its pointwise 95 % interval.

    table: rows of one setting. y: a metric, or evaluation_*. x: "step" or "own_tokens_total". outside: rows of plain
    TRL runs, drawn as grey lines. -> axes. Raises RunError where a metric is missing or settings are mixed.
    """
    from analysis.curves import draw_curves
    from analysis.style import figure, keep_numbers

    _, axes = figure()
    plotted = draw_curves(axes, table, y, x, outside, log=y == "gradient_norm")
    axes.set(xlabel=AXIS_NAMES.get(x, x), ylabel=AXIS_NAMES.get(y, y))
    keep_numbers(axes, plotted)
    return axes


def gradient_norm_and_accuracy(table: pd.DataFrame):
    """Gradient norm (log scale) and held-out accuracy side by side over steps: the form of the paper's Figure 1."""
    import pandas as pd

    from analysis.curves import draw_curves
    from analysis.style import PAGE, figure, keep_numbers

    _, (left, right) = figure(2, PAGE)
    numbers = [draw_curves(left, table, "gradient_norm", log=True), draw_curves(right, table, "evaluation_accuracy")]
    left.set(xlabel="step", ylabel="gradient norm before clipping")
    right.set(xlabel="step", ylabel=AXIS_NAMES["evaluation_accuracy"])
    keep_numbers(left, pd.concat(numbers))
    return left, right
