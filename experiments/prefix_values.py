"""Measures how the chance to end right moves along a task's rollouts, by continuing their prefixes many times.

python experiments/prefix_values.py arithmetic_long docs/study/prefix_values
Writes FILE.csv, a row per prefix, and FILE.png: V of some rollouts along their tokens, and how much of the reward's
variance is decided by then. Of the warm-started tiny policy; single-turn tasks only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from experiments.command_line import exit_codes

PARTS = 16  # prefixes of a rollout, at equal shares of its tokens
SEQUENCES_AT_ONCE = 256


def prefix_values(task_name: str, prompts: int, rollouts: int, continuations: int) -> pd.DataFrame:
    """Returns a row per prefix: prompt, rollout, position, length, reward of the rollout and value (mean reward)."""
    # torch and transformers take seconds to import, so only now
    from experiments.tiny_sampler import task_without_tools, tiny_sampler
    from otb.laboratory.oracle import continued

    task, model, tokenizer, sampler = tiny_sampler(task_without_tools(task_name), None, "runs/prefix_values")
    rows = list(task.eval_dataset())[:prompts]
    found = []
    for number, (row, drawn) in enumerate(zip(rows, sampler.rollouts(rows, rollouts, seed=0), strict=True)):
        for which, rollout in enumerate(drawn):
            start, length = int(rollout.own.nonzero()[0]), int(rollout.own.sum())
            ends = sorted({length * part // PARTS for part in range(PARTS)})
            prefixes = [rollout.ids[: start + end] for end in ends]
            values = []
            per_batch = max(1, SEQUENCES_AT_ONCE // continuations)
            for first in range(0, len(prefixes), per_batch):
                batch = prefixes[first : first + per_batch]
                values += continued(model, tokenizer, task, row, batch, start, continuations, 1.0)[1].mean(1).tolist()
            facts = {"prompt": number, "rollout": which, "length": length, "reward": rollout.reward}
            found += [facts | {"position": end, "value": value} for end, value in zip(ends, values, strict=True)]
        print(f"prompt {number + 1} of {len(rows)}", flush=True)
    return pd.DataFrame(found)


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/prefix_values.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    parser = argparse.ArgumentParser(
        prog="python experiments/prefix_values.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("task", help="of conf/task, such as arithmetic_long")
    parser.add_argument("file", type=Path, help="of the figure and its numbers, without an ending")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--rollouts", type=int, default=6, help="of each prompt")
    parser.add_argument("--continuations", type=int, default=32, help="of each of 16 prefixes of a rollout")
    options = parser.parse_args(arguments)
    with exit_codes(after_stop="begins anew"):
        from analysis.prefix_values import draw  # matplotlib: so only now, too
        from analysis.style import save

        table = prefix_values(options.task, options.prompts, options.rollouts, options.continuations)
        for file in save(draw(table, options.task), options.file, ("png",)):
            print(file)


if __name__ == "__main__":
    command_line(sys.argv[1:])
