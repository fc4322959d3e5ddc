"""What each baseline adds to a training step, and what measuring the gradient noise adds.

    python benchmarks/estimators.py --policy FOLDER [--rounds 3 --steps 6]

Every arm trains on the same rollouts (learning rate 0, equal seeds; 64 rollouts a step), in blocks that alternate
because a shared machine's speed drifts; differences are taken round by round. Seconds are those of the processor on a
CPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial

import torch
import transformers
from step_time import WARM_UP_STEPS, StepTimes
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb import OTBConfig, OTBTrainer
from otb.baselines.damped_probe import DampedProbe
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.otb_carry_loo import otb_carry_loo
from otb.baselines.otb_exact import otb_exact
from otb.baselines.rloo import rloo
from otb.baselines.value import Value
from otb.tasks.arithmetic import Arithmetic
from otb.trainer import isolated_random_state

IN_MICRO_BATCHES = dict(per_device_train_batch_size=8, gradient_accumulation_steps=8, log_energy=True)
ARMS = {  # name -> baseline, options, the arm it is compared with
    "rloo": (rloo, {}, "rloo"),
    "otb": (otb, {}, "rloo"),
    "otb_carry_loo": (otb_carry_loo, {}, "rloo"),
    "energy_probe": (EnergyProbe(), {}, "rloo"),
    "energy_probe, group_correction": (EnergyProbe(group_correction=True), {}, "rloo"),
    "damped_probe": (DampedProbe(), {}, "rloo"),
    "value": (Value(), {}, "rloo"),
    "ob_exact": (ob_exact, {}, "rloo"),
    "otb_exact": (otb_exact, {}, "rloo"),
    "otb, 8 micro-batches": (otb, IN_MICRO_BATCHES, "otb"),
    "the same, noise measured": (otb, IN_MICRO_BATCHES | {"measure_gradient_noise": True}, "otb, 8 micro-batches"),
}


def block(policy: str, steps: int, baseline, options: dict) -> float:
    """Median seconds of a step over a block, warm-up left out."""
    task, on_cpu, times = Arithmetic(), not torch.cuda.is_available(), StepTimes()
    with tempfile.TemporaryDirectory() as output, isolated_random_state(seed=0):
        usual = partial(
            OTBConfig, output_dir=output, use_cpu=on_cpu, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=0.0, loss_type="dr_grpo",
            num_generations=4, max_completion_length=task.max_completion_length, max_steps=steps + WARM_UP_STEPS,
        )  # fmt: skip
        trainer = OTBTrainer(
            AutoModelForCausalLM.from_pretrained(policy),
            task.reward,
            usual(**({"per_device_train_batch_size": 64} | options)),
            task.train_dataset(),
            processing_class=AutoTokenizer.from_pretrained(policy),
            callbacks=[times],
            baseline=baseline,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return statistics.median(times.seconds[WARM_UP_STEPS:])


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
        {name: block(given.policy, given.steps, *arm[:2]) for name, arm in ARMS.items()} for _ in range(given.rounds)
    ]
    print(f"{'arm':<32}{'step':>9}{'more than':>24}{'by':>9}   [smallest, largest] of {given.rounds} rounds")
    for name, (_, _, other) in ARMS.items():
        more = sorted(seconds[name] - seconds[other] for seconds in rounds)
        step = statistics.median(seconds[name] for seconds in rounds)
        print(f"{name:<32}{step:>7.3f} s{other:>24}{statistics.median(more):>7.3f} s   [{more[0]:.3f}, {more[-1]:.3f}]")


if __name__ == "__main__":
    main()
