"""The colours of every figure and page: Okabe and Ito's, told apart by colour-blind readers, then Tol's muted ones.

paper.mplstyle has the same cycle, which a test holds to this one; which arm has which colour is in arms.py.
"""

from __future__ import annotations

from pathlib import Path

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY_BLUE, BLACK, YELLOW = "#E69F00", "#56B4E9", "#000000", "#F0E442"
SPARE_COLOURS = ("#882255", "#44AA99", "#999933", "#332288", "#DDCC77", "#117733")  # Tol's muted set
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK, *SPARE_COLOURS)  # of the rollouts of a group

SCHEME = Path(__file__).with_name("scheme.css")  # of the pages themselves, light and dark


def rgb(colour: str) -> tuple[int, int, int]:
    """Returns red, green and blue (0 to 255) of a colour such as "#E69F00"."""
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue
