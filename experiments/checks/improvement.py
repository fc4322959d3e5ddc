"""Checks of the group `improvement`. Imports no torch."""

from __future__ import annotations

from types import SimpleNamespace

from omegaconf import DictConfig

from experiments.planning.memory import SAMPLES_HERE
from otb.errors import RunError
from otb.training.options import refuse_improvement


def check_improvement(cfg: DictConfig, improvement) -> None:
    """Raises RunError for what the updates of `improvement`, built from cfg, cannot go with."""
    try:
        refuse_improvement(SimpleNamespace(**cfg.trainer))
    except ValueError as error:
        raise RunError(str(error).replace("no improvement=", "improvement=none")) from error
    if cfg.parallel.name != "ddp":
        raise RunError(
            f"parallel={cfg.parallel.name} divides parameters and their gradients, and an improvement update has been "
            "tried with whole ones alone. Use parallel=ddp, or improvement=none."
        )
    if cfg.rollouts_by.name not in SAMPLES_HERE:
        raise RunError(
            f"rollouts_by={cfg.rollouts_by.name} has not been tried with improvement updates: they change the weights "
            "between the rollouts and their own update. Use rollouts_by=hf, or improvement=none."
        )
    window = getattr(improvement, "window", 0)
    drawn = getattr(improvement, "mode", "") == "shuffled"  # from those of earlier steps, and the first has none
    if cfg.steps <= window + drawn:
        raise RunError(
            f"steps={cfg.steps} leaves no step for an improvement update: the first comes after improvement.window="
            f"{window} steps{' and one to draw from' if drawn else ''}. Use steps={4 * window} or more, or "
            "improvement=none."
        )
