"""Measures how the chance to end right moves along a task's rollouts, by continuing their prefixes many times.

python study/scripts/prefix_values.py arithmetic_long study/figures/prefix_values
Writes FILE.csv, a row per prefix, and FILE.png: V of some rollouts along their tokens, and how much of the reward's
variance is decided by then. Of the warm-started tiny policy; single-turn tasks only.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.running.command_line import exit_codes
from otb.errors import RunError

PARTS = 16  # prefixes of a rollout, at equal shares of its tokens
SEQUENCES_AT_ONCE = 256


def prefix_values(task_name: str, prompts: int, rollouts: int, continuations: int) -> pd.DataFrame:
    """Returns a row per prefix: prompt, rollout, position, length, reward of the rollout, value and its standard error.

    Raises RunError for what cannot be measured as asked.
    """
    # torch and transformers take seconds to import, so only now
    from otb.laboratory.oracle import continued
    from study.scripts.tiny_sampler import task_without_tools, tiny_sampler

    task = task_without_tools(task_name)
    held_out = list(task.eval_dataset())
    if not 1 <= prompts <= len(held_out):
        raise RunError(f"--prompts {prompts} must be from 1 to {len(held_out)}, the task's held-out prompts.")
    task, model, tokenizer, sampler = tiny_sampler(task, None, "runs/prefix_values")
    rows = held_out[:prompts]
    found = []
    for number, (row, drawn) in enumerate(zip(rows, sampler.rollouts(rows, rollouts, seed=0), strict=True)):
        for which, rollout in enumerate(drawn):
            start, length = int(rollout.own.nonzero()[0]), int(rollout.own.sum())
            ends = sorted({length * part // PARTS for part in range(PARTS)})
            prefixes = [rollout.ids[: start + end] for end in ends]
            rewards = []
            per_batch = max(1, SEQUENCES_AT_ONCE // continuations)
            for first in range(0, len(prefixes), per_batch):
                batch = prefixes[first : first + per_batch]
                rewards.append(continued(model, tokenizer, task, row, batch, start, continuations, 1.0)[1].numpy())
            of_prefixes = np.concatenate(rewards)
            columns = {"prompt": number, "rollout": which, "length": length, "reward": rollout.reward, "position": ends}
            columns["value"] = of_prefixes.mean(axis=1)
            columns["value_error"] = of_prefixes.std(axis=1, ddof=1) / math.sqrt(continuations)
            found.append(pd.DataFrame(columns))
        print(f"prompt {number + 1} of {len(rows)}", flush=True)
    return pd.concat(found, ignore_index=True)


def command_line(arguments: list[str]) -> None:
    """Runs `python study/scripts/prefix_values.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    parser = argparse.ArgumentParser(
        prog="python study/scripts/prefix_values.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("task", help="of conf/task, such as arithmetic_long")
    parser.add_argument("file", type=Path, help="of the figure and its numbers, without an ending")
    parser.add_argument("--prompts", type=int, default=24, help="held-out ones")
    parser.add_argument("--rollouts", type=int, default=2, help="of each prompt")
    parser.add_argument("--continuations", type=int, default=32, help="of each of 16 prefixes of a rollout")
    options = parser.parse_args(arguments)
    with exit_codes(after_stop="begins anew"):
        for name, value, least in (("rollouts", options.rollouts, 1), ("continuations", options.continuations, 2)):
            if value < least:
                raise RunError(f"--{name} {value} must be at least {least}.")
        from analysis.style import save
        from study.scripts.prefix_figure import draw  # matplotlib: so only now, too

        table = prefix_values(options.task, options.prompts, options.rollouts, options.continuations)
        for file in save(draw(table, options.task), options.file, ("png",)):
            print(file)


if __name__ == "__main__":
    command_line(sys.argv[1:])
