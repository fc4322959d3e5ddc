"""What token weights add to a training step with LoRA, beside the same trainer without them.

    python benchmarks/token_weights.py --policy FOLDER [--rounds 5 --steps 6]

Every arm trains on the same rollouts (learning rate 0, equal seeds; 128 rollouts a step). A round is a block without
weights and one of each signal, because a shared machine's speed drifts; ratios are taken round by round. Seconds are
those of the processor on a CPU. With the adapter's B at 0 the weights are uniform, which changes no time.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import transformers
from peft import LoraConfig
from step_time import block

from otb import OTBTrainer
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.token_weights import TokenWeights

SIGNALS = ("uniform", "surprisal", "entropy_reduction", "divergence", "arca")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--signals", nargs="+", default=["surprisal", "arca"], choices=SIGNALS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    lora = LoraConfig(target_modules="all-linear", r=16, task_type="CAUSAL_LM")
    seconds = partial(block, policy=arguments.policy, steps=arguments.steps, options={}, on_cpu=on_cpu)
    for baseline in (rloo, otb):
        trainer = partial(OTBTrainer, baseline=baseline, peft_config=lora)
        arms = {"none": trainer}
        arms |= {signal: partial(trainer, token_weights=TokenWeights(signal)) for signal in arguments.signals}
        rounds = [{name: seconds(kind) for name, kind in arms.items()} for _ in range(arguments.rounds)]
        for name in arms:
            ratios = sorted(times[name] / times["none"] for times in rounds)
            median = statistics.median(times[name] for times in rounds)
            print(
                f"{baseline.__name__}, {name}: {median:.3f} s a step, ratio to none {statistics.median(ratios):.3f} "
                f"[{ratios[0]:.3f}, {ratios[-1]:.3f}] over {len(rounds)} rounds",
                flush=True,
            )


if __name__ == "__main__":
    main()
