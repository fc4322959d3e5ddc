"""What the methods beside the baseline add to a training step.

    python benchmarks/methods.py --policy FOLDER [--rounds 3 --steps 6]

Every arm makes steps of 64 rollouts with learning rate 0 and equal seeds, in blocks that alternate because a shared
machine's speed drifts; differences are taken round by round. Seconds are those of the processor on a CPU. A copy that
samples draws other rollouts than the policy does: `tokens` says how many.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
import transformers
from step_time import WARM_UP_STEPS, StepTimes
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb import OTBConfig, OTBTrainer
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.schedules import LengthTriggeredDecay
from otb.tasks.arithmetic import Arithmetic
from otb.trainer import isolated_random_state

COPY = dict(sampler_dtype="bfloat16", vllm_importance_sampling_mode="token_truncate")
ARMS: dict[str, tuple[Any, dict, dict, str]] = {  # name -> baseline, arguments of OTBTrainer, options, compared with
    "rloo": (rloo, {}, {}, "rloo"),
    "rloo, lr_schedule": (rloo, {"lr_schedule": LengthTriggeredDecay()}, {}, "rloo"),
    "rloo, bfloat16 copy": (rloo, {}, COPY, "rloo"),
    "otb": (otb, {}, {}, "otb"),
    "otb, bfloat16 copy": (otb, {}, COPY, "otb"),
}


def block(policy: str, steps: int, baseline, arguments: dict, options: dict) -> tuple[float, float]:
    """Returns median seconds, and mean own tokens, of a step over a block, warm-up left out."""
    task, on_cpu, times = Arithmetic(), not torch.cuda.is_available(), StepTimes()
    with tempfile.TemporaryDirectory() as output, isolated_random_state(seed=0):
        trainer = OTBTrainer(
            AutoModelForCausalLM.from_pretrained(policy),
            task.reward,
            OTBConfig(
                output_dir=output, use_cpu=on_cpu, bf16=False, gradient_checkpointing=False, report_to="none",
                save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=0.0, loss_type="dr_grpo",
                num_generations=4, per_device_train_batch_size=64, lr_scheduler_type="constant",
                max_completion_length=task.max_completion_length, max_steps=steps + WARM_UP_STEPS, **options,
            ),
            task.train_dataset(),
            processing_class=AutoTokenizer.from_pretrained(policy),
            callbacks=[times],
            baseline=baseline,
            **arguments,
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    tokens = [row["own_tokens"] for row in trainer.state.log_history[WARM_UP_STEPS:] if "own_tokens" in row]
    return statistics.median(times.seconds[WARM_UP_STEPS:]), statistics.mean(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    rounds = [
        {name: block(given.policy, given.steps, *arm[:3]) for name, arm in ARMS.items()} for _ in range(given.rounds)
    ]
    print(
        f"{'arm':<24}{'step':>9}{'tokens':>9}{'more than':>12}{'by':>9}   [smallest, largest] of {given.rounds} rounds"
    )
    for name, (*_, other) in ARMS.items():
        more = sorted(measured[name][0] - measured[other][0] for measured in rounds)
        step = statistics.median(measured[name][0] for measured in rounds)
        spread = f"[{more[0]:.3f}, {more[-1]:.3f}]"
        print(
            f"{name:<24}{step:>7.3f} s{rounds[0][name][1]:>9.0f}{other:>12}{statistics.median(more):>7.3f} s   {spread}"
        )


if __name__ == "__main__":
    main()
