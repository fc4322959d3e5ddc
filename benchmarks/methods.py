"""What each method beside the baseline adds to a training step, side by side with the same trainer without it.

    python benchmarks/methods.py --policy FOLDER [--rounds 5 --steps 6] [--methods arca occ] [--baselines rloo otb]

Every arm makes steps of 128 rollouts with learning rate 0 and equal seeds, so that all but the bfloat16 copy train on
the same rollouts. A round is a block without the method and one with it, because a shared machine's speed drifts;
ratios are taken round by round. Seconds are those of the processor on a CPU. With LoRA's B at 0 the token weights are
uniform, which changes no time; every timed step has an improvement update.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig
from step_time import WARM_UP_STEPS, block

from otb import OTBTrainer
from otb.auxiliary import MultiTokenPrediction
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.improvement import PolicyImprovement
from otb.schedules import LengthTriggeredDecay
from otb.token_weights import TokenWeights

BASELINES = {"rloo": rloo, "otb": otb}


class Method(NamedTuple):
    """What a method needs.

    added: arguments of OTBTrainer. options: of OTBConfig, for the method alone. shared, shared_options: the same for
    both sides of the comparison.
    """

    added: dict[str, Any] = {}
    options: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    shared_options: dict[str, Any] = {}


LORA = {"peft_config": LoraConfig(target_modules="all-linear", r=16, task_type="CAUSAL_LM")}
CONSTANT = {"lr_scheduler_type": "constant"}
TWICE = {"num_iterations": 2}  # an auxiliary head measures what changed since the first update of a batch
METHODS = {
    "length_triggered": Method(
        {"lr_schedule": LengthTriggeredDecay()}, shared_options={"lr_scheduler_type": "constant"}
    ),
    "hf_bfloat16": Method(options={"sampler_dtype": "bfloat16", "vllm_importance_sampling_mode": "token_truncate"}),
    **{signal: Method({"token_weights": TokenWeights(signal)}, shared=LORA) for signal in ("surprisal", "arca")},
    "pipo": Method({"improvement": PolicyImprovement("constant", window=WARM_UP_STEPS)}),
    **{mode: Method({"auxiliary": MultiTokenPrediction(mode)}, shared_options=TWICE) for mode in ("detach", "occ")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--baselines", nargs="+", default=["rloo"], choices=BASELINES)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    seconds = partial(block, policy=given.policy, steps=given.steps, on_cpu=on_cpu)
    for baseline in given.baselines:
        for name in given.methods:
            method = METHODS[name]
            plain = partial(OTBTrainer, baseline=BASELINES[baseline], **method.shared)
            rounds = [
                (
                    seconds(plain, options=method.shared_options),
                    seconds(partial(plain, **method.added), options=method.shared_options | method.options),
                )
                for _ in range(given.rounds)
            ]
            ratios = sorted(with_it / without for without, with_it in rounds)
            without, with_it = (statistics.median(side) for side in zip(*rounds, strict=True))
            print(
                f"{baseline}, {name}: {without:.3f} s a step without, {with_it:.3f} s with, ratio "
                f"{statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}] over {len(rounds)} rounds",
                flush=True,
            )


if __name__ == "__main__":
    main()
