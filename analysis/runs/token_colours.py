"""The colours of tokens: one scale for the terminal (show.py), the browser of rollouts, the report's page and figures.

White is 0, and of a probability 1; the largest value of a prompt group has the full colour. The colours are Okabe and
Ito's, which colour-blind readers tell apart, and light enough for black text.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from analysis.palette import GREEN, ORANGE, PURPLE, SKY_BLUE, YELLOW, rgb

FULL_COLOURS = {  # of the largest value, and of the largest below 0, where there is one
    "advantage": (rgb(ORANGE), rgb(SKY_BLUE)),  # > 0: the token becomes more likely
    "baseline": (rgb(PURPLE), rgb(SKY_BLUE)),
    "energy": (rgb(GREEN), rgb(GREEN)),
    "score norm": (rgb(GREEN), rgb(GREEN)),  # a token's share of the energy
    "probability": (rgb(YELLOW), rgb(YELLOW)),  # of a token that the policy would hardly have sampled
}


def largest(values: Iterable[Iterable[float]]) -> float:
    """Returns the largest finite absolute value of a group's tokens, a row per rollout; 0 where there is none."""
    return max((abs(value) for row in values for value in row if np.isfinite(value)), default=0.0)


def background(value: float, limit: float, by: str = "advantage") -> tuple[int, int, int] | None:
    """Returns red, green and blue (0 to 255) behind a token. The browser of rollouts has the same in colours.js.

    Args:
        value: of the token.
        limit: the value that has the full colour; 0 where all values are 0. A probability has it at 0.
        by: what the value is, of FULL_COLOURS.

    Returns:
        None where the value is not finite; it should stand out otherwise.
    """
    if not np.isfinite(value):
        return None
    if by == "probability":
        value, limit = 1 - value, 1.0
    full = FULL_COLOURS[by][int(value < 0)]
    share = min(abs(value) / limit, 1.0) if limit else 0.0
    red, green, blue = (round(255 + (channel - 255) * share) for channel in full)
    return red, green, blue
