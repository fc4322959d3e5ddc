"""Time of the OTB advantages for 512 rollouts x 8192 tokens in groups of 8, w given, on one CPU core.

python benchmarks/advantages.py
"""

from __future__ import annotations

import statistics
import time

import torch

from otb.advantages import advantages
from otb.baselines.otb import otb
from otb.rollouts import OwnTokens, RolloutGroups

ROLLOUTS, TOKENS, GROUP_SIZE, REPEATS = 512, 8192, 8, 15


def otb_advantages(rewards, response_mask, w):
    """(B,), (B, C), (B, C) -> (B, C): what the trainer does once it has w."""
    own = OwnTokens(response_mask)
    groups = (-1, GROUP_SIZE)
    rollouts = RolloutGroups(rewards.view(groups), own.lengths.view(groups), own.pack(w).unflatten(0, groups))
    return own.unpack(advantages(rollouts, otb(rollouts)).flatten(0, 1))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w, rewards = torch.rand(ROLLOUTS, TOKENS), (torch.rand(ROLLOUTS) < 0.5).float()
    unbroken = torch.arange(TOKENS) < torch.randint(TOKENS // 4, TOKENS + 1, (ROLLOUTS, 1))
    gaps = unbroken.clone()
    for start in range(500, TOKENS - 300, 1500):  # a tool's output after every 1,200 own tokens
        gaps[:, start : start + 300] = False
    for name, mask in (("unbroken masks", unbroken), ("masks with tool gaps", gaps)):
        times = []
        for _ in range(REPEATS):
            started = time.process_time()
            otb_advantages(rewards, mask, w)
            times.append(1e3 * (time.process_time() - started))
        print(f"{name}: median {statistics.median(times):.1f} ms, best {min(times):.1f} ms over {REPEATS} calls")


if __name__ == "__main__":
    main()
