"""What an improvement update adds to a training step, in pairs with the same trainer without it.

    python benchmarks/improvement.py --policy FOLDER [--pairs 5 --steps 6]

Both train on the same rollouts (learning rate 0, equal seeds; 128 rollouts a step), in blocks that alternate, because a
shared machine's speed drifts; ratios are taken pair by pair. Seconds are those of the processor on a CPU. Every timed
step has an improvement update.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import transformers
from step_time import WARM_UP_STEPS, block

from otb import OTBTrainer
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.improvement import PolicyImprovement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    seconds = partial(block, policy=arguments.policy, steps=arguments.steps, options={}, on_cpu=on_cpu)
    for baseline in (rloo, otb):
        trainer = partial(OTBTrainer, baseline=baseline)
        improving = partial(trainer, improvement=PolicyImprovement("constant", window=WARM_UP_STEPS))
        pairs = [[seconds(kind) for kind in (trainer, improving)] for _ in range(arguments.pairs)]
        ratios = sorted(improved / plain for plain, improved in pairs)
        print(
            f"{baseline.__name__}: none {statistics.median(pair[0] for pair in pairs):.3f} s, improvement update "
            f"{statistics.median(pair[1] for pair in pairs):.3f} s, ratio {statistics.median(ratios):.3f} "
            f"[{ratios[0]:.3f}, {ratios[-1]:.3f}] over {len(pairs)} pairs",
            flush=True,
        )


if __name__ == "__main__":
    main()
