"""The benchmarks of a CPU in one run, beside the committed figures: `make bench`, under 6 minutes on a quiet core.

    python benchmarks/bench.py [--write] [PART ...]        # parts: steps overhead estimators startup

Each figure is a ratio to what a user would take instead, measured in turn, with a 95 % interval, or seconds where
there is nothing to compare with. `--write` replaces the figures of these parts in benchmarks/results.csv;
benchmarks/README.md says what they mean and on which machine they were taken.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from step_time import AGAINST_TRL, PLAIN, otb_arm, parts_of_steps, policy_of, quiet, ratio, side_by_side

from otb.advantages import advantages
from otb.baselines.otb import otb
from otb.rollouts import OwnTokens, RolloutGroups
from otb.score_norms import logit_gradient_proxy

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results.csv")
COLUMNS = ("name", "unit", "value", "low", "high", "pairs")
OVERHEAD = "score norms, baseline and advantages / loss of a plain step"  # claim C5 of the study reads it
EPS = 1e-8


def steps() -> Iterator[tuple]:
    """Compares training steps with TRL's (benchmarks/step_time.py)."""
    for name, (group_size, ours, theirs) in AGAINST_TRL.items():
        pairs = side_by_side(policy_of(ours.task), group_size, ours, theirs, 12 if group_size > 4 else 40)
        yield (f"step: {name}", "ratio", *ratio(pairs), len(pairs))


def overhead() -> Iterator[tuple]:
    """Takes what score norms, baseline and advantages cost beside the loss, where each pass is made as TRL makes it."""
    arm = otb_arm(otb, PLAIN)
    pairs = parts_of_steps(policy_of(arm.task), arm, 40)
    yield (OVERHEAD, "ratio", *ratio(pairs), len(pairs))


def estimators() -> Iterator[tuple]:
    """Compares OTB's advantages, after the forward, with the reference's way; and twice the tokens with once."""
    for rollouts, tokens, group_size in ((512, 8192, 4), (512, 8192, 32), (4096, 2048, 8)):
        data = made_up(rollouts, tokens)
        pairs = timed(lambda data=data, n=group_size: by_groups(*data, n), lambda d=data, n=group_size: by_loops(*d, n))
        name = f"OTB's advantages / loop over groups, {rollouts} x {tokens}, N={group_size}"
        yield (name, "ratio", *ratio(pairs), len(pairs))
    short, long = made_up(512, 4096), made_up(512, 8192)
    pairs = timed(lambda: by_groups(*long, 8), lambda: by_groups(*short, 8), 15)
    yield ("OTB's advantages, 8192 tokens / 4096 tokens", "ratio", *ratio(pairs), len(pairs))


def startup() -> Iterator[tuple]:
    """Takes the seconds of `--help`, and of the first step of a run whose policy is in the cache."""
    run = [sys.executable, str(ROOT / "experiments" / "run.py")]
    yield ("run.py --help", "s", *spread([seconds_of([*run, "--help"]) for _ in range(5)]))
    with tempfile.TemporaryDirectory() as folder:
        one_step = ["steps=1", "evaluation.every=0", "task.eval_prompts=8", f"runs_dir={folder}", "overwrite=true"]
        yield ("a cached run of one step", "s", *spread([seconds_of([*run, *one_step]) for _ in range(3)]))


PARTS = {"steps": steps, "overhead": overhead, "estimators": estimators, "startup": startup}


def made_up(rollouts: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Returns rewards (B,), masks (B, C) of responses of different lengths, log pi and log sum pi^2 (B, C)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 4, tokens + 1, (rollouts, 1), generator=generator)
    rewards = (torch.rand(rollouts, generator=generator) < 0.5).float()
    probabilities = torch.rand(rollouts, tokens, generator=generator).clamp(min=1e-4)
    return rewards, torch.arange(tokens) < lengths, probabilities.log(), probabilities.square().log()


def by_groups(rewards, mask, log_probs, log_sum_sq_probs, group_size: int) -> torch.Tensor:
    """Returns OTB's advantages (B, C) as the trainer makes them after the forward."""
    own = OwnTokens(mask)
    groups = (-1, group_size)
    w = own.pack(logit_gradient_proxy(log_probs, log_sum_sq_probs)).unflatten(0, groups)
    rollouts = RolloutGroups(rewards.view(groups), own.lengths.view(groups), w)
    return own.unpack(advantages(rollouts, otb(rollouts)).flatten(0, 1))


def by_loops(rewards, mask, log_probs, log_sum_sq_probs, group_size: int) -> torch.Tensor:
    """Returns the same, built as the reference is: returns and W of the whole batch, then a loop over groups."""
    mask = mask.float()
    token_rewards = torch.zeros_like(log_probs).scatter(1, mask.sum(1, keepdim=True).long() - 1, rewards.unsqueeze(1))
    returns = token_rewards.flip(-1).cumsum(-1).flip(-1)
    energy = ((1 - 2 * log_probs.exp() + log_sum_sq_probs.exp()) * mask).cumsum(-1)
    baselines = torch.zeros_like(returns)
    for first in range(0, len(returns), group_size):
        rows = torch.arange(first, first + group_size)
        of_group = mask[rows]
        weighted, total = ((values * of_group).sum(0) for values in (returns[rows] * energy[rows], energy[rows]))
        baselines[rows] = (weighted / (total + EPS)).expand(group_size, -1)
        lengths, order = of_group.sum(1).sort()
        if lengths[-1] > lengths[-2]:
            baselines[rows[order[-1]], int(lengths[-2]) :] = 0.0
    return (returns - baselines) * mask


def timed(ours: Callable, theirs: Callable, times: int = 7) -> np.ndarray:
    """Returns the seconds of the processor that both take in turn, (times, 2), after a first call of each."""
    pairs = []
    for _ in range(times + 1):
        pair = []
        for call in (ours, theirs):
            started = time.thread_time()
            call()
            pair.append(time.thread_time() - started)
        pairs.append(pair)
    return np.array(pairs[1:])


def seconds_of(command: list[str]) -> float:
    """Returns how long a command takes on the clock. Raises CalledProcessError where it fails."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return time.perf_counter() - started


def spread(seconds: list[float]) -> tuple[float, float, float, int]:
    """Returns median, least and most, and their number."""
    return float(np.median(seconds)), min(seconds), max(seconds), len(seconds)


def report(found: pd.DataFrame) -> str:
    """Returns a table of what was found, beside the committed figures."""
    committed = pd.read_csv(RESULTS).set_index("name") if RESULTS.exists() else pd.DataFrame()
    lines = [f"{'':58} {'now':>24} {'committed':>24}"]
    for row in found.to_dict("records"):
        before = committed.loc[row["name"]].to_dict() if row["name"] in committed.index else None
        lines.append(f"{row['name']:58} {text(row):>24} {text(before) if before else 'none':>24}")
    return "\n".join(lines)


def text(row: dict) -> str:
    """Returns a figure with its interval."""
    unit = " s" if row["unit"] == "s" else ""
    return f"{row['value']:.3g}{unit} [{row['low']:.3g}, {row['high']:.3g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--write", action="store_true", help="replace their figures in benchmarks/results.csv")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is no part. Known: {', '.join(PARTS)}.")
    quiet()
    rows = []
    for part in options.parts or PARTS:
        for row in PARTS[part]():
            rows.append(dict(zip(COLUMNS, row, strict=True)))
            print(f"{rows[-1]['name']}: {text(rows[-1])}", flush=True)
    found = pd.DataFrame(rows)
    print(f"\n{report(found)}")
    if options.write:
        kept = pd.read_csv(RESULTS) if RESULTS.exists() else found.iloc[:0]
        kept = kept[~kept.name.isin(found.name)]
        pd.concat([kept, found]).to_csv(RESULTS, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
