"""What each method beside the baseline adds to a training step, in turn with the same trainer without it.

    python benchmarks/methods.py --policy FOLDER [--steps 20] [--methods arca occ] [--baselines rloo otb]

Ratios and seconds are those of benchmarks/step_time.py. Both sides make plain steps, because some methods cannot have
lean ones. Every counted step has an improvement update.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from step_time import LORA, PLAIN, TWICE, WARM_UP_STEPS, otb_arm, quiet, ratio, side_by_side

from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.methods.auxiliary import MODES, MultiTokenPrediction
from otb.methods.improvement import PolicyImprovement
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights

BASELINES = {"rloo": rloo, "otb": otb}
SIGNALS = ("surprisal", "entropy_reduction", "divergence", "arca")


class Method(NamedTuple):
    """What a method needs.

    added: arguments of OTBTrainer. options: of OTBConfig, for the method alone. shared, shared_options: the same for
    both sides of the comparison.
    """

    added: dict[str, Any] = {}
    options: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    shared_options: dict[str, Any] = {}


METHODS = {
    "length_triggered": Method({"lr_schedule": LengthTriggeredDecay()}),
    "hf_bfloat16": Method(options={"sampler_dtype": "bfloat16", "vllm_importance_sampling_mode": "token_truncate"}),
    **{signal: Method({"token_weights": TokenWeights(signal)}, shared=LORA) for signal in SIGNALS},
    "pipo": Method({"improvement": PolicyImprovement("constant", window=WARM_UP_STEPS)}),
    # an auxiliary head measures what changed since the first update of a batch
    **{mode: Method({"auxiliary": MultiTokenPrediction(mode)}, shared_options=TWICE) for mode in MODES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each side, even")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--baselines", nargs="+", default=["rloo"], choices=BASELINES)
    given = parser.parse_args()
    quiet()
    for baseline in given.baselines:
        for name in given.methods:
            method = METHODS[name]
            without = otb_arm(BASELINES[baseline], PLAIN | method.shared_options, **method.shared)
            with_it = without._replace(options=without.options | method.options, given=without.given | method.added)
            found, low, high = ratio(pairs := side_by_side(given.policy, 4, with_it, without, given.steps))
            seconds = pairs.mean(0)
            print(
                f"{baseline}, {name}: {seconds[1]:.3f} s a step without, {seconds[0]:.3f} s with, ratio {found:.3f} "
                f"[{low:.3f}, {high:.3f}] over {len(pairs)} pairs",
                flush=True,
            )


if __name__ == "__main__":
    main()
