"""Keeps evaluations and measurements from changing the random numbers that training draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Restores the random states of torch, numpy and random after the block, whatever is drawn inside.

    Only the current GPU takes part: reading another GPU's state would allocate memory there.
    seed: seeds all three inside the block, so the same call draws the same numbers; None continues from the current
    state.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = None  # without CUDA, torch finds the devices itself
    if torch.cuda.is_available():
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                seed_torch(seed, gpus)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_torch(seed: int, gpus: list[int] | None) -> None:
    """Seeds the generators of the CPU and, if `gpus` lists it, the current GPU; None seeds all that torch finds."""
    if gpus is None:
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if gpus:
        torch.cuda.manual_seed(seed)
