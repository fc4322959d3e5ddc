"""Baselines: one pure function per file, `name(rollouts, **its_own_arguments) -> value` (docs/add_a_baseline.md).

The value is broadcastable to (P, G, T); a baseline that also divides returns `Baseline(value, scale)`. `declare`
attaches what the trainer must compute for it and the smallest group it works with. Nothing here or in the files beside
it imports torch, so that a configuration can be checked before the first heavy import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

KNOWN_NEEDS = frozenset({"score_norms"})


class Baseline(NamedTuple):
    """A baseline that also scales: advantage = (return - value) / scale, both broadcastable to (P, G, T)."""

    value: Tensor
    scale: Tensor


def declare(needs: set[str] = frozenset(), min_group_size: int = 1, per_token: bool = False) -> Callable:
    """Says what a baseline needs beyond rewards and lengths, the smallest group it works with, and its shape.

    needs: subset of {"score_norms"}: the trainer computes the squared score norms w per token, which costs one
    no-grad forward where TRL makes none of its own.
    per_token: its value differs between the tokens of a rollout, so that losses and masks which read one advantage
    per rollout are refused beside it.

    Raises:
        ValueError: a need that no trainer can supply.
    """
    if unknown := set(needs) - KNOWN_NEEDS:
        raise ValueError(f"needs={sorted(unknown)} cannot be supplied; a baseline may need {sorted(KNOWN_NEEDS)}.")

    def attach(baseline: Callable) -> Callable:
        baseline.needs, baseline.min_group_size, baseline.per_token = frozenset(needs), min_group_size, per_token
        return baseline

    return attach


def needs_of(baseline: Callable) -> frozenset[str]:
    """What a baseline declared; a bare function without `declare` needs nothing."""
    return getattr(_undecorated(baseline), "needs", frozenset())


def min_group_size_of(baseline: Callable) -> int:
    return getattr(_undecorated(baseline), "min_group_size", 1)


def is_per_token(baseline: Callable) -> bool:
    return getattr(_undecorated(baseline), "per_token", False)


def name_of(baseline: Callable) -> str:
    """The function's (or the object's class') own name, for error messages and logs."""
    inner = _undecorated(baseline)
    return getattr(inner, "__name__", type(inner).__name__)


def _undecorated(baseline: Callable) -> Callable:
    while isinstance(baseline, partial):  # Hydra's _partial_: true
        baseline = baseline.func
    return baseline
