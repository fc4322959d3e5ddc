"""Measures how the chance to end right moves along a task's rollouts, by continuing their prefixes many times.

python study/scripts/prefix_values.py
Writes study/figures/prefix_values.csv, a row per prefix, and .png: V of some rollouts of the warm-started tiny policy
along their tokens, and how much of the reward's variance is decided by then.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.style import save
from otb.laboratory.oracle import continued
from study.scripts.prefix_figure import draw
from study.scripts.tiny_sampler import single_turn_task, tiny_sampler

TASK = "arithmetic_long"
FILE = Path(__file__).resolve().parents[1] / "figures" / "prefix_values"
PROMPTS, ROLLOUTS = 24, 2  # held-out prompts, and rollouts of each
PARTS = 16  # prefixes of a rollout, at equal shares of its tokens
CONTINUATIONS = 32  # of each prefix
SEQUENCES_AT_ONCE = 256


def prefix_values() -> pd.DataFrame:
    """Returns a row per prefix: prompt, rollout, position, length, the rollout's reward, value and value_error."""
    task = single_turn_task(TASK)
    rows = list(task.eval_dataset())[:PROMPTS]
    task, model, tokenizer, sampler = tiny_sampler(task, None, "runs/prefix_values")
    found = []
    for number, (row, drawn) in enumerate(zip(rows, sampler.rollouts(rows, ROLLOUTS, seed=0), strict=True)):
        for which, rollout in enumerate(drawn):
            start, length = int(rollout.own.nonzero()[0]), int(rollout.own.sum())
            ends = sorted({length * part // PARTS for part in range(PARTS)})
            prefixes = [rollout.ids[: start + end] for end in ends]
            rewards = []
            per_batch = max(1, SEQUENCES_AT_ONCE // CONTINUATIONS)
            for first in range(0, len(prefixes), per_batch):
                batch = prefixes[first : first + per_batch]
                rewards.append(continued(model, tokenizer, task, row, batch, start, CONTINUATIONS, 1.0)[1].numpy())
            of_prefixes = np.concatenate(rewards)
            columns = {"prompt": number, "rollout": which, "length": length, "reward": rollout.reward, "position": ends}
            columns["value"] = of_prefixes.mean(axis=1)
            columns["value_error"] = of_prefixes.std(axis=1, ddof=1) / math.sqrt(CONTINUATIONS)
            found.append(pd.DataFrame(columns))
        print(f"prompt {number + 1} of {len(rows)}", flush=True)
    return pd.concat(found, ignore_index=True)


if __name__ == "__main__":
    for file in save(draw(prefix_values(), TASK), FILE, ("png",)):
        print(file)
