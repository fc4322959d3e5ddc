"""Splits a table into its runs, as arrays: a thousand tables of forty columns would take most of a report's time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def by_run(table: pd.DataFrame, *columns: str) -> Iterator[tuple[str, dict[str, NDArray]]]:
    """Yields (run, column -> its values in the order of steps) per run of a table, by name."""
    codes, names = pd.factorize(table["run"], sort=True)
    order = np.lexsort((table["step"].to_numpy(), codes))
    values = {column: table[column].to_numpy()[order] for column in columns}
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for (start, end), name in zip(pairwise([*starts, len(table)]), names, strict=True):
        yield str(name), {column: array[start:end] for column, array in values.items()}
