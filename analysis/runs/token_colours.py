"""The colours of tokens: one scale for the terminal (show.py), the report's page and figures.

White is 0; the largest value of a prompt group has the full colour. The colours are Okabe and Ito's, which colour-blind
readers tell apart, and light enough for black text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

POSITIVE = (230, 159, 0)  # orange: an advantage > 0, the token becomes more likely
NEGATIVE = (86, 180, 233)  # sky blue: an advantage < 0
ENERGY = (0, 158, 115)  # bluish green: energy, which has no sign


def largest(values: Iterable[Iterable[float]]) -> float:
    """Returns the largest finite absolute value of a group's tokens, a row per rollout; 0 where there is none."""
    return max((abs(value) for row in values for value in row if np.isfinite(value)), default=0.0)


def background(value: float, limit: float, by: str = "advantage") -> tuple[int, int, int] | None:
    """Returns red, green and blue (0 to 255) behind a token.

    Args:
        value: advantage or energy of the token.
        limit: the value that has the full colour; 0 where all values are 0.
        by: "advantage" or "energy".

    Returns:
        None where the value is not finite; it should stand out otherwise.
    """
    if not np.isfinite(value):
        return None
    full = ENERGY if by == "energy" else POSITIVE if value > 0 else NEGATIVE
    share = min(abs(value) / limit, 1.0) if limit else 0.0
    red, green, blue = (round(255 + (channel - 255) * share) for channel in full)
    return red, green, blue
