"""What an auxiliary head adds to a training step, in pairs with the same trainer without one.

    python benchmarks/auxiliary.py --policy FOLDER [--pairs 5 --steps 6]

Every arm trains on the same rollouts (learning rate 0, equal seeds; 128 rollouts a step, two updates per batch), each
in a block right after one without a head, because a shared machine's speed drifts; ratios are taken pair by pair.
Seconds are those of the processor on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import transformers
from step_time import block

from otb import OTBTrainer
from otb.auxiliary import MODES, MultiTokenPrediction
from otb.baselines.rloo import rloo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--modes", nargs="+", default=["detach", "occ"], choices=MODES)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    options = {"num_iterations": 2}
    seconds = partial(block, policy=arguments.policy, steps=arguments.steps, options=options, on_cpu=on_cpu)
    trainer = partial(OTBTrainer, baseline=rloo)
    for mode in arguments.modes:
        with_head = partial(trainer, auxiliary=MultiTokenPrediction(mode))
        pairs = [[seconds(kind) for kind in (trainer, with_head)] for _ in range(arguments.pairs)]
        ratios = sorted(headed / without for without, headed in pairs)
        print(
            f"none {statistics.median(pair[0] for pair in pairs):.3f} s, {mode} "
            f"{statistics.median(pair[1] for pair in pairs):.3f} s, ratio {statistics.median(ratios):.3f} "
            f"[{ratios[0]:.3f}, {ratios[-1]:.3f}] over {len(pairs)} pairs",
            flush=True,
        )


if __name__ == "__main__":
    main()
