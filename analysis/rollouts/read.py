"""Reads rollouts/*.parquet into arrays: three million tokens in seconds, with no Python object per token.

Columns that an older file lacks are absent from `Group.values`, and the page does not offer them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from analysis.runs.show import visible
from otb.errors import RunError

COLUMNS = {"advantage": "advantages", "baseline": "baselines", "energy": "energies", "log_prob": "log_probs"}
NEEDED = ("prompt", "rollout", "prompt_text", "tokens", "own", "reward", "advantages")


class Strings:
    """Numbers strings as they come: a page holds each token's text once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, texts: list[str]) -> NDArray[np.uint32]:
        """Returns the number of each text."""
        return np.array([self.numbers.setdefault(text, len(self.numbers)) for text in texts], np.uint32)


@dataclass
class Group:
    """The kept rollouts of one prompt.

    Attributes:
        prompt: its number in the step.
        text: the prompt.
        rollouts: (G,) numbers of the rollouts.
        rewards: (G,) float, NaN where unscored.
        endings: (G,) how each rollout ended; None in files that do not say.
        tokens: per rollout, the number of each token's text in `Strings`; tool tokens included.
        own: per rollout, which of its tokens the policy sampled.
        values: per rollout, name of COLUMNS -> a value per own token.
    """

    prompt: int
    text: str
    rollouts: list[int]
    rewards: list[float]
    endings: list[str] | None
    tokens: list[NDArray[np.uint32]]
    own: list[NDArray[np.bool_]]
    values: list[dict[str, NDArray[np.float32]]]


def read_groups(files: list[Path], strings: Strings) -> Iterator[Group]:
    """Yields the prompt groups of one step, in order.

    files: of the step; several where each process wrote one. Raises RunError where one is damaged.
    """
    try:
        table = pa.concat_tables([pq.read_table(file) for file in files], promote_options="default")
        table = table.sort_by([("prompt", "ascending"), ("rollout", "ascending")])
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        lists = {name: per_row(columns[column]) for name, column in COLUMNS.items() if is_filled(columns.get(column))}
        tokens, own = token_numbers(columns["tokens"], strings), per_row(columns["own"])
    except (pa.ArrowException, OSError, KeyError) as error:
        needed = ", ".join(NEEDED)
        raise RunError(f"{files[0]} is damaged, or no file of rollouts, which has {needed}: {error}") from error
    check_lengths(files[0], tokens, own, lists)
    prompts = columns["prompt"].to_numpy()
    endings = columns["ending"].to_pylist() if is_filled(columns.get("ending")) else None
    starts = np.flatnonzero(np.append(True, prompts[1:] != prompts[:-1])) if len(prompts) else np.array([], int)
    for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True):
        rows = slice(int(start), int(end))
        yield Group(
            prompt=int(prompts[start]),
            text=visible(columns["prompt_text"][int(start)].as_py()).replace("\u21b5\n", "\n"),
            rollouts=columns["rollout"][rows].to_pylist(),
            rewards=columns["reward"].to_numpy(zero_copy_only=False)[rows].tolist(),
            endings=endings and endings[rows],
            tokens=tokens[rows],
            own=own[rows],
            values=[{name: values[i] for name, values in lists.items()} for i in range(*rows.indices(len(prompts)))],
        )


def is_filled(column: pa.Array | None) -> bool:
    """Tells whether a file has a column, and a value in every row; what was not measured is null there."""
    return column is not None and not column.null_count and not pa.types.is_null(column.type)


def per_row(column: pa.Array) -> list[NDArray]:
    """Splits a column of lists into an array per row."""
    ends = np.cumsum(pc.list_value_length(column).to_numpy())
    return np.split(column.flatten().to_numpy(zero_copy_only=False), ends[:-1])


def token_numbers(column: pa.Array, strings: Strings) -> list[NDArray]:
    """Returns the number of every token's text, an array per row; control characters are spelled out."""
    encoded = column.flatten().dictionary_encode()
    numbers = strings.number([visible(text) for text in encoded.dictionary.to_pylist()])
    ends = np.cumsum(pc.list_value_length(column).to_numpy())
    return np.split(numbers[encoded.indices.to_numpy()], ends[:-1])


def check_lengths(file: Path, tokens: list[NDArray], own: list[NDArray], lists: dict[str, list[NDArray]]) -> None:
    """Raises RunError where a rollout has not one value per own token."""
    for i, mask in enumerate(own):
        counts = {name: len(values[i]) for name, values in lists.items()}
        if len(mask) != len(tokens[i]) or set(counts.values()) - {int(mask.sum())}:
            raise RunError(
                f"{file} is damaged: row {i} has {len(tokens[i])} tokens, {int(mask.sum())} of them own, and as "
                f"values {counts}. There must be one per own token. Remove the file."
            )
