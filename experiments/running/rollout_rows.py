"""Makes the rows of rollouts/*.parquet (docs/runs.md). KeptRollouts writes them; analysis/ reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from otb.baselines import Baseline
from otb.errors import unwritable
from otb.files import whole
from otb.loss_inputs import response_mask
from otb.methods import Step


def rollout_rows(
    step: Step, endings: list[str], tokenizer: PreTrainedTokenizerBase, groups: int | None, rank: int
) -> Iterator[dict]:
    """Yields a row for each kept rollout of the process `rank`.

    step: the batch. endings: how each rollout of this process ended. groups: keep only the first `groups` whole groups;
    None keeps every rollout, even if its group spans processes.
    """
    rollouts, output, log_probs = step.rollouts, step.output, step.log_probs
    value = step.baseline.value if isinstance(step.baseline, Baseline) else step.baseline
    advantages, baseline = step.advantages.flatten(0, 1), value.expand(step.advantages.shape).flatten(0, 1)
    group_size = rollouts.group_size
    mask, own_mask = output["completion_mask"].bool(), response_mask(output)
    count = len(own_mask) if groups is None else min(groups, len(own_mask) // group_size) * group_size
    norms = None if rollouts.score_norms is None else rollouts.score_norms.flatten(0, 1)
    first = rank * len(own_mask)  # this process's rows among the gathered ones
    for i in range(count):
        length = int(own_mask[i].sum())
        tokens = output["completion_ids"][i][mask[i]]
        prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()]
        yield {
            "prompt": (first + i) // group_size,
            "rollout": (first + i) % group_size,
            "prompt_text": tokenizer.decode(prompt),
            "response_text": tokenizer.decode(tokens),
            "tokens": [tokenizer.decode(token) for token in tokens],
            "own": own_mask[i][mask[i]].tolist(),
            "reward": float(rollouts.rewards.flatten()[first + i]),
            "ending": endings[i],
            "advantages": per_token(advantages[first + i], length),
            "baselines": per_token(baseline[first + i], length),
            "energies": None if norms is None else norms[first + i][:length].cumsum(0).tolist(),
            "log_probs": None if log_probs is None else log_probs[i][own_mask[i]].tolist(),
        }


def per_token(values: Tensor, length: int) -> list[float]:
    """Returns one value per own token. values: (T,), or (1,) if the whole rollout has one value."""
    return values[:length].tolist() if len(values) > 1 else [float(values[0])] * length


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Writes a table; the file is either complete or absent. Raises RunError if it cannot be written."""
    try:
        with whole(path) as aside:
            table.to_parquet(aside)
    except OSError as error:
        raise unwritable(path, error) from error
