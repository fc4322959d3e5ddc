"""Baselines: one pure function per file, `name(rollouts, **its_own_arguments) -> value` (docs/add_a_baseline.md).

The value is broadcastable to (P, G, T); a baseline that also divides returns `Baseline(value, scale)`. `declare`
attaches what the trainer must compute for it and the smallest group it works with. One that learns over the steps is a
small class with the same call and `reduce`, `update`, `state_dict`, `load_state_dict`: `StatefulBaseline`. Nothing
here or in the files beside it imports torch at its top: a configuration is checked before the first heavy import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates

# Those of the softmax at the temperature, which must then be what rollouts are sampled from.
SCORES = frozenset({"score_norms", "sequence_norms", "prefix_norms"})
KNOWN_NEEDS = SCORES | {"hidden_states"}


class Baseline(NamedTuple):
    """A baseline that also scales: advantage = (return - value) / scale, both broadcastable to (P, G, T)."""

    value: Tensor
    scale: Tensor


class StatefulBaseline(Protocol):
    """A baseline that learns over the steps. Its value for a step depends on the state that earlier steps left."""

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of a micro-batch: rows, tensors (B, ...) that are kept, and totals, to be summed. With hidden_states only.

        A row's second dimension may be that of the own tokens: it is padded with 0 to the widest micro-batch. Both are
        in `rollouts.reduced` and `rollouts.totals` afterwards, of all rollouts and all processes.
        """

    def __call__(self, rollouts: RolloutGroups) -> Tensor | Baseline:
        """The value, like any baseline; changes no state."""

    def update(self, rollouts: RolloutGroups) -> None:
        """Learns from a step. The trainer calls it after the step's advantages are made."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...


def declare(
    needs: set[str] = frozenset(), min_group_size: int = 1, per_token: bool = False, unbiased: bool | None = None
) -> Callable:
    """Says what a baseline needs beyond rewards and lengths, the smallest group it works with, and its shape.

    needs: subset of KNOWN_NEEDS. "score_norms": the squared score norms w per token, at one no-grad forward where TRL
    makes none of its own. "hidden_states": the trainer hands them to the baseline's `reduce`, at one no-grad forward.
    "sequence_norms", "prefix_norms": exact norms by backward passes, one per rollout or one per own token.
    per_token: its value differs between the tokens of a rollout, so that losses and masks which read one advantage
    per rollout are refused beside it.
    unbiased: True where the expected gradient is exactly that of the expected reward, False where it is not, None where
    nothing is claimed. tests/test_unbiased.py sums over every group of a small policy and holds the baseline to it.

    Raises:
        ValueError: a need that no trainer can supply.
    """
    if unknown := set(needs) - KNOWN_NEEDS:
        raise ValueError(f"needs={sorted(unknown)} cannot be supplied; a baseline may need {sorted(KNOWN_NEEDS)}.")

    def attach(baseline: Callable) -> Callable:
        baseline.needs, baseline.min_group_size, baseline.per_token = frozenset(needs), min_group_size, per_token
        baseline.unbiased = unbiased
        return baseline

    return attach


def needs_of(baseline: Callable) -> frozenset[str]:
    """What a baseline declared; a bare function without `declare` needs nothing."""
    return getattr(_undecorated(baseline), "needs", frozenset())


def needs_scores(baseline: Callable) -> bool:
    """Whether it reads norms of the score of the softmax, which must then be the distribution sampled from."""
    return bool(needs_of(baseline) & SCORES)


def carries_state(baseline: Callable) -> bool:
    return hasattr(baseline, "update")


def min_group_size_of(baseline: Callable) -> int:
    return getattr(_undecorated(baseline), "min_group_size", 1)


def is_per_token(baseline: Callable) -> bool:
    return getattr(_undecorated(baseline), "per_token", False)


def is_unbiased(baseline: Callable) -> bool | None:
    """Returns what the baseline declares of its bias; None for one that declares nothing."""
    return getattr(_undecorated(baseline), "unbiased", None)


def name_of(baseline: Callable) -> str:
    """The function's (or the object's class') own name, for error messages and logs."""
    inner = _undecorated(baseline)
    return getattr(inner, "__name__", type(inner).__name__)


def _undecorated(baseline: Callable) -> Callable:
    while isinstance(baseline, partial):  # Hydra's _partial_: true
        baseline = baseline.func
    return baseline
