"""Draws learning curves of several arms over steps and over tokens. The picture of a single run: run_picture.py."""

from __future__ import annotations

import pandas as pd

from analysis.curves import draw_curves
from analysis.style import COLUMN, PAGE, figure, keep_numbers, legend_below

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


def learning_curves(
    table: pd.DataFrame,
    y: str = "evaluation_accuracy",
    x: str = "step",
    outside: pd.DataFrame | None = None,
    width: float = COLUMN,
):
    """Draws y over x per arm: every seed as a thin line, the interquartile mean and its pointwise 95 % interval.

    Args:
        table: rows of one setting.
        y: a metric, or evaluation_*.
        x: "step" or "own_tokens_total".
        outside: rows of plain TRL runs, drawn as grey lines.
        width: of the figure, in inches.

    Returns:
        The axes.

    Raises:
        RunError: a metric is missing, or settings are mixed.
    """
    _, axes = figure(width=width)
    plotted = draw_curves(axes, table, y, x, outside, log=y == "gradient_norm")
    axes.set(xlabel=AXIS_NAMES.get(x, x), ylabel=AXIS_NAMES.get(y, y))
    legend_below(axes)
    keep_numbers(axes, plotted)
    return axes


def gradient_norm_and_accuracy(table: pd.DataFrame):
    """Draws gradient norm (log scale) and held-out accuracy over steps side by side: the form of the paper's Figure 1.

    Returns:
        The two axes.
    """
    _, (left, right) = figure(2, PAGE)
    numbers = [draw_curves(left, table, "gradient_norm", log=True), draw_curves(right, table, "evaluation_accuracy")]
    left.set(xlabel="step", ylabel="gradient norm before clipping")
    right.set(xlabel="step", ylabel=AXIS_NAMES["evaluation_accuracy"])
    legend_below((left, right))
    keep_numbers(left, pd.concat(numbers))
    return left, right
