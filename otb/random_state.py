"""Keeps random numbers apart from those of training: called around evaluations and measurements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Restores the random states of torch, numpy and random afterwards, whatever is drawn inside.

    seed: seeds them inside, so that the same call draws the same numbers; None continues from the current state.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
