"""Step time of OTBTrainer against trl.GRPOTrainer, in pairs on the same rollouts.

    python benchmarks/step_time.py --policy FOLDER [--pairs 5 --steps 12]

The learning rate is 0 and the seeds are equal, so both trainers sample the same rollouts and differ only in what OTB
adds. Blocks alternate (A B A B ...), because a shared machine's speed drifts; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from otb import OTBConfig, OTBTrainer
from otb.tasks.arithmetic import Arithmetic
from otb.trainer import isolated_random_state

CASES = {  # name -> options of GRPOConfig
    "extra pass": dict(),
    "TRL's pass reused (num_iterations=2)": dict(num_iterations=2),
}
WARM_UP_STEPS = 2


class StepTimes(TrainerCallback):
    """Seconds of each step: wall time on a GPU, processor time of the one thread on a CPU that others may share."""

    def __init__(self):
        self.seconds: list[float] = []
        self.clock = time.perf_counter if torch.cuda.is_available() else time.process_time

    def on_step_begin(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.started = self.clock()

    def on_step_end(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self.clock() - self.started)


def block(trainer_class, policy: str, steps: int, options: dict, on_cpu: bool) -> float:
    """Mean seconds of a step over a block, warm-up left out."""
    task = Arithmetic()
    with tempfile.TemporaryDirectory() as output, isolated_random_state(seed=0):
        arguments = OTBConfig(
            output_dir=output, use_cpu=on_cpu, bf16=not on_cpu, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=0.0, loss_type="dr_grpo",
            num_generations=4, per_device_train_batch_size=128, max_completion_length=task.max_completion_length,
            max_steps=steps + WARM_UP_STEPS, **options,
        )  # fmt: skip
        times = StepTimes()
        trainer = trainer_class(
            AutoModelForCausalLM.from_pretrained(policy),
            task.reward,
            arguments,
            task.train_dataset(),
            processing_class=AutoTokenizer.from_pretrained(policy),
            callbacks=[times],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return statistics.mean(times.seconds[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", required=True, help="folder of the warm-started tiny policy")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="even: a cycle of num_iterations=2 is two steps")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)
    rows = []
    for name, options in CASES.items():
        pairs = [
            [block(kind, arguments.policy, arguments.steps, options, on_cpu) for kind in (OTBTrainer, GRPOTrainer)]
            for _ in range(arguments.pairs)
        ]
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        row = {
            "case": name,
            "grpo_seconds": statistics.median(theirs for _, theirs in pairs),
            "otb_seconds": statistics.median(ours for ours, _ in pairs),
            "ratio_median": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }
        rows.append(row)
        print(
            f"{name}: GRPOTrainer {row['grpo_seconds']:.3f} s, OTBTrainer {row['otb_seconds']:.3f} s, ratio "
            f"{row['ratio_median']:.3f} [{row['ratio_min']:.3f}, {row['ratio_max']:.3f}] over {len(pairs)} pairs",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
