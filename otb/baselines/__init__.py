"""Baselines: one pure function per file, `name(rollouts, **its_own_arguments) -> value` (docs/add_a_baseline.md).

The value is broadcastable to (P, G, T); a baseline that also divides returns `Baseline(value, scale)`. `declare`
attaches what the trainer must compute for it and the smallest group it works with. One that learns over the steps is a
small class with the same call and `reduce`, `update`, `state_dict`, `load_state_dict`: `StatefulBaseline`. Neither this
file nor those beside it import torch at their top: a configuration is checked before the first heavy import.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates

EXACT_NORMS = frozenset({"sequence_norms", "prefix_norms"})  # of whole gradients
# Norms of the score of the softmax at the temperature, which must then be what rollouts are sampled from.
SCORES = EXACT_NORMS | {"score_norms"}
KNOWN_NEEDS = SCORES | {"hidden_states"}


class Baseline(NamedTuple):
    """A baseline that also scales: advantage = (return - value) / scale, both broadcastable to (P, G, T)."""

    value: Tensor
    scale: Tensor


class StatefulBaseline(Protocol):
    """A baseline that learns over the steps. Its value for a step depends on the state that earlier steps left."""

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Reduces one micro-batch to what is kept of its hidden states.

        Returns (rows, totals): rows, a tensor (B, ...) per name, kept per rollout; totals, a tensor per name, summed
        over micro-batches and processes. A row's second dimension may be that of the own tokens; it is padded with 0 to
        the widest micro-batch. Both stand in `rollouts.reduced` and `rollouts.totals` afterwards, of all rollouts of
        all processes. Called only for baselines that declare hidden_states.
        """

    def __call__(self, rollouts: RolloutGroups) -> Tensor | Baseline:
        """Returns the value, like any baseline, and changes no state; it may be asked several times a step."""

    def update(self, rollouts: RolloutGroups) -> None:
        """Learns from a step. The trainer calls it after the step's advantages are made."""

    def state_dict(self) -> dict:
        """Returns the state, as torch.save takes it: the same on all processes."""

    def load_state_dict(self, state: dict) -> None:
        """Goes on from a state that `state_dict` returned."""


def declare(
    needs: Set[str] = frozenset(), min_group_size: int = 1, per_token: bool = False, unbiased: bool | None = None
) -> Callable:
    """Declares what a baseline needs beyond rewards and lengths, the smallest group it works with, and its shape.

    needs: subset of KNOWN_NEEDS. "score_norms": the squared score norms w per token, at one forward where TRL makes
    none and the loss cannot share its own. "hidden_states": the trainer hands them to the baseline's `reduce`, at such
    a forward.
    "sequence_norms", "prefix_norms": exact norms by backward passes, one per rollout or one per own token.
    per_token: the value differs between the tokens of a rollout, so that losses and masks which read one advantage
    per rollout are refused beside it.
    unbiased: True where the expected gradient is exactly that of the expected reward, False where it is not, None where
    nothing is claimed. tests/estimators/test_unbiased.py sums over every group of a small policy and holds the baseline
    to it.

    Raises:
        ValueError: a need that no trainer can supply.
    """
    if unknown := set(needs) - KNOWN_NEEDS:
        raise ValueError(f"needs={sorted(unknown)} cannot be supplied; a baseline may need {sorted(KNOWN_NEEDS)}.")

    def attach(baseline: Callable) -> Callable:
        declared = dict(needs=frozenset(needs), min_group_size=min_group_size, per_token=per_token, unbiased=unbiased)
        for name, value in declared.items():
            setattr(baseline, name, value)
        return baseline

    return attach


def needs_of(baseline: Callable) -> frozenset[str]:
    """Returns what the baseline declared that it needs; nothing for a function without `declare`."""
    return getattr(_undecorated(baseline), "needs", frozenset())


def needs_scores(baseline: Callable) -> bool:
    """Tells whether it reads norms of the softmax's score, so that rollouts must be sampled from this softmax."""
    return bool(needs_of(baseline) & SCORES)


def carries_state(baseline: Callable) -> TypeGuard[StatefulBaseline]:
    """Tells whether the baseline learns over the steps."""
    return hasattr(baseline, "update")


def min_group_size_of(baseline: Callable) -> int:
    """Returns the smallest group that the baseline works with."""
    return getattr(_undecorated(baseline), "min_group_size", 1)


def is_per_token(baseline: Callable) -> bool:
    """Tells whether the baseline's value differs between the tokens of a rollout."""
    return getattr(_undecorated(baseline), "per_token", False)


def is_unbiased(baseline: Callable) -> bool | None:
    """Returns what the baseline declares of its bias; None for one that declares nothing."""
    return getattr(_undecorated(baseline), "unbiased", None)


def name_of(baseline: Callable) -> str:
    """Returns the name of the function, or of the object's class, for error messages and logs."""
    inner = _undecorated(baseline)
    return getattr(inner, "__name__", type(inner).__name__)


def _undecorated(baseline: Callable) -> Callable:
    while isinstance(baseline, partial):  # Hydra's _partial_: true
        baseline = baseline.func
    return baseline
