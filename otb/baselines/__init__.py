"""Baselines: one pure function per file, `name(rollouts, **its_own_arguments) -> value` (docs/add_a_baseline.md).

The value is broadcastable to (P, G, T); a baseline that also divides returns `Baseline(value, scale)`. `declare` says
what the trainer must compute for it and how small a group may be. A baseline that learns over the steps is a small
class with the methods of `StatefulBaseline`. No file in this folder imports torch at its top, because a configuration
is checked before the first heavy import.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates

EXACT_NORMS = frozenset({"sequence_norms", "prefix_norms"})  # of whole gradients
# Norms of the score of the softmax at the temperature; rollouts must then be sampled from this softmax.
SCORES = EXACT_NORMS | {"score_norms"}
KNOWN_NEEDS = SCORES | {"hidden_states"}


class Baseline(NamedTuple):
    """A baseline that also scales: advantage = (return - value) / scale, both broadcastable to (P, G, T)."""

    value: Tensor
    scale: Tensor


class StatefulBaseline(Protocol):
    """A baseline that learns over the steps; its value depends only on the state that earlier steps left."""

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Reduces a micro-batch with hidden states to small tensors. Called if the baseline declares hidden_states.

        Returns (rows, totals): rows, a tensor (B, ...) per name, kept per rollout; totals, a tensor per name, summed
        over micro-batches and processes. A row's second dimension may be own tokens, which are padded with 0 to the
        widest micro-batch. `rollouts.reduced` and `rollouts.totals` then hold them for the rollouts of all processes.
        """

    def __call__(self, rollouts: RolloutGroups) -> Tensor | Baseline:
        """Returns the value, like any baseline, and changes no state; it may be called several times a step."""

    def update(self, rollouts: RolloutGroups) -> None:
        """Learns from a step. The trainer calls it after it has computed the step's advantages."""

    def state_dict(self) -> dict:
        """Returns the state for torch.save; it is the same on all processes."""

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""


def declare(
    needs: Set[str] = frozenset(), min_group_size: int = 1, per_token: bool = False, unbiased: bool | None = None
) -> Callable:
    """Declares what a baseline needs beyond rewards and lengths, its smallest group, and whether it is unbiased.

    needs: subset of KNOWN_NEEDS. "score_norms": the squared score norms w per token; they cost a forward if neither TRL
    nor the loss already makes one. "hidden_states": the trainer hands them to the baseline's `reduce`, at the same
    cost. "sequence_norms", "prefix_norms": exact norms with one backward pass per rollout or per own token.
    per_token: the value differs between the tokens of a rollout. Losses and masks that read one advantage per rollout
    are then refused.
    unbiased: True if the expected gradient is exactly the gradient of the expected reward, False if it is not, None if
    nothing is claimed. tests/estimators/test_unbiased.py checks the claim over every group of a small policy.

    Raises:
        ValueError: a need that no trainer can supply.
    """
    if unknown := set(needs) - KNOWN_NEEDS:
        raise ValueError(f"needs={sorted(unknown)} cannot be supplied; a baseline may only need {sorted(KNOWN_NEEDS)}.")

    def attach(baseline: Callable) -> Callable:
        declared = dict(needs=frozenset(needs), min_group_size=min_group_size, per_token=per_token, unbiased=unbiased)
        for name, value in declared.items():
            setattr(baseline, name, value)
        return baseline

    return attach


def needs_of(baseline: Callable) -> frozenset[str]:
    """Returns the needs that the baseline declared; the empty set for a function without `declare`."""
    return getattr(_undecorated(baseline), "needs", frozenset())


def needs_scores(baseline: Callable) -> bool:
    """Returns whether the baseline reads norms of the softmax's score; rollouts must then come from this softmax."""
    return bool(needs_of(baseline) & SCORES)


def carries_state(baseline: Callable) -> TypeGuard[StatefulBaseline]:
    """Returns whether the baseline learns over the steps."""
    return hasattr(baseline, "update")


def min_group_size_of(baseline: Callable) -> int:
    """Returns the smallest group that the baseline works with."""
    return getattr(_undecorated(baseline), "min_group_size", 1)


def is_per_token(baseline: Callable) -> bool:
    """Returns whether the baseline's value differs between the tokens of a rollout."""
    return getattr(_undecorated(baseline), "per_token", False)


def is_unbiased(baseline: Callable) -> bool | None:
    """Returns whether the baseline declares itself unbiased; None if it makes no claim."""
    return getattr(_undecorated(baseline), "unbiased", None)


def name_of(baseline: Callable) -> str:
    """Returns the name of the function or of the object's class, for error messages and logs."""
    inner = _undecorated(baseline)
    return getattr(inner, "__name__", type(inner).__name__)


def _undecorated(baseline: Callable) -> Callable:
    while isinstance(baseline, partial):  # Hydra's _partial_: true
        baseline = baseline.func
    return baseline
