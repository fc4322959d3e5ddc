"""Step time of OTBTrainer against trl.GRPOTrainer, and of the baselines against `rloo`, in turn in one process.

    python benchmarks/step_time.py [--policy FOLDER --steps 40 --cases 'otb / GRPOTrainer, N=4' ...]
    python benchmarks/step_time.py --policy FOLDER --prompts 4 --any-reward ...   # a real model

Both trainers run in threads of which one works at a time, so that a step of one is paired with the next step of the
other: a shared machine's speed drifts, but not within a second. The ratio is that of the sums; its 95 % interval is a
bootstrap over pairs of steps. Seconds are those of the thread's processor, on a GPU and with tools, whose programs are
other processes, those on the clock. Both train, because a better policy has more groups that teach nothing. Where both
sample in the same way, the learning rate is 0 and each pair has one seed: it is a pair of the same rollouts, and its
ratio that of the work alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the threads below would otherwise take all cores each

import argparse
import json
import statistics
import tempfile
import threading
import time
import zlib
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from otb import OTBConfig, OTBTrainer
from otb.baselines.damped_probe import DampedProbe
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.otb_carry_loo import otb_carry_loo
from otb.baselines.otb_exact import otb_exact
from otb.baselines.rloo import rloo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.baselines.value import Value
from otb.policies.tiny_warm_start import WarmStart, warm_start
from otb.random_state import isolated_random_state
from otb.sandbox.bubblewrap import Bubblewrap
from otb.tasks import Task
from otb.tasks.arithmetic import Arithmetic
from otb.tasks.arithmetic_tools import ArithmeticTools
from otb.tasks.python_tool import PythonTool

WARM_UP_STEPS = 2
PROMPTS = 16
LORA = {"peft_config": LoraConfig(target_modules="all-linear", r=16, lora_alpha=32, task_type="CAUSAL_LM")}


class Arm(NamedTuple):
    """One side of a comparison: a trainer's class, options of its configuration, further arguments, and its task."""

    kind: type
    options: dict = {}
    given: dict = {}
    task: Task = Arithmetic()


def otb_arm(baseline: Any, options: dict | None = None, **given) -> Arm:
    """Returns the arm of an OTBTrainer with a baseline."""
    return Arm(OTBTrainer, options or {}, {"baseline": baseline, **given})


TRL, RLOO = Arm(GRPOTrainer), otb_arm(rloo)
TOOLS = {"environment_factory": partial(PythonTool, Bubblewrap())}  # TRL's loop runs the programs of a turn one by one
PLAIN, TWICE = {"lean_steps": False}, {"num_iterations": 2}
FROZEN = {"learning_rate": 0.0}
IN_MICRO_BATCHES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "log_energy": True}
BASELINES = {  # beside otb
    "otb_carry_loo": otb_carry_loo,
    "energy_probe": EnergyProbe(),
    "energy_probe, group_correction": EnergyProbe(group_correction=True),
    "damped_probe": DampedProbe(),
    "trajectory_cv": TrajectoryCV(),
    "value": Value(),
    "ob_exact": ob_exact,
    "otb_exact": otb_exact,
}
AGAINST_TRL = {  # what -> group size, ours, what it is compared with
    "otb / GRPOTrainer, N=4": (4, otb_arm(otb), TRL),
    "rloo / GRPOTrainer, N=4": (4, RLOO, TRL),
    "otb / GRPOTrainer, N=32": (32, otb_arm(otb), TRL),
    "otb / rloo, N=4": (4, otb_arm(otb, FROZEN), otb_arm(rloo, FROZEN)),
    "otb without lean steps / GRPOTrainer, N=4": (4, otb_arm(otb, PLAIN | FROZEN), Arm(GRPOTrainer, FROZEN)),
    "the same with two updates, where TRL's pass is reused": (
        4,
        otb_arm(otb, PLAIN | TWICE | FROZEN),
        Arm(GRPOTrainer, TWICE | FROZEN),
    ),
    "otb / GRPOTrainer, N=4, LoRA": (4, otb_arm(otb, **LORA), Arm(GRPOTrainer, given=LORA)),
    "otb / GRPOTrainer, N=4, tools": (
        4,
        Arm(OTBTrainer, {}, {"baseline": otb, **TOOLS}, ArithmeticTools()),
        Arm(GRPOTrainer, {}, TOOLS, ArithmeticTools()),
    ),
}
CASES = AGAINST_TRL | {f"{name} / rloo, N=4": (4, otb_arm(baseline), RLOO) for name, baseline in BASELINES.items()}
CASES["otb, noise measured / not, 8 micro-batches"] = (
    4, otb_arm(otb, IN_MICRO_BATCHES | {"measure_gradient_noise": True}), otb_arm(otb, IN_MICRO_BATCHES)
)  # fmt: skip


class Turns(TrainerCallback):
    """Lets a trainer make its step only when it is its turn, and keeps the seconds of each."""

    def __init__(self, mine: threading.Semaphore, others: threading.Semaphore, own_processor: bool):
        self.mine, self.others = mine, others
        self.seconds: list[float] = []
        self.clock = time.thread_time if own_processor else time.perf_counter

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()

    def on_step_begin(self, args, state, control, **kwargs):
        self.mine.acquire()
        torch.manual_seed(state.global_step)  # of the pair
        self.started = self.now()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(self.now() - self.started)
        self.others.release()


def policy_of(task: Task) -> str:
    """Returns the folder of the tiny policy, warm-started on a task."""
    return str(warm_start(task, WarmStart()))


def digest_reward(completions: list, **columns) -> list[float]:
    """Returns 0 or 1 by a digest of each response: groups of a policy that is never right would have no gradient."""
    return [float(zlib.crc32(completion[-1]["content"].encode()) % 2) for completion in completions]


def trainer_of(
    arm: Arm, policy: str, group_size: int, steps: int, output: str, turns: Turns, prompts=PROMPTS, any_reward=False
):
    """Returns the trainer of an arm, ready to train."""
    task, on_cpu = arm.task, not torch.cuda.is_available()
    usual = dict(
        output_dir=output, use_cpu=on_cpu, bf16=not on_cpu, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=0.0 if any_reward else 3e-4,
        lr_scheduler_type="constant", loss_type="dr_grpo", num_generations=group_size,
        per_device_train_batch_size=prompts * group_size,
        max_completion_length=task.max_completion_length, max_steps=steps + WARM_UP_STEPS,
        max_tool_calling_iterations=None if task.environment is None else task.max_turns - 1,
    )  # fmt: skip
    arguments = OTBConfig(**(usual | arm.options))
    trainer = arm.kind(
        AutoModelForCausalLM.from_pretrained(policy),
        digest_reward if any_reward else task.reward,
        arguments,
        task.train_dataset(),
        processing_class=AutoTokenizer.from_pretrained(policy),
        callbacks=[turns],
        **arm.given,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def side_by_side(
    policy: str, group_size: int, ours: Arm, theirs: Arm, steps: int, prompts: int = PROMPTS, any_reward: bool = False
) -> np.ndarray:
    """Returns the seconds of each pair of steps, (steps, 2), warm-up left out.

    prompts: of a step. any_reward: whether to use `digest_reward`, with a learning rate of 0.
    """
    first, second = threading.Semaphore(1), threading.Semaphore(0)
    own_processor = not torch.cuda.is_available() and ours.task.environment is None
    both = (Turns(first, second, own_processor), Turns(second, first, own_processor))
    with tempfile.TemporaryDirectory() as output, isolated_random_state(seed=0):
        trainers = [
            trainer_of(arm, policy, group_size, steps, output, turns, prompts, any_reward)
            for arm, turns in zip((ours, theirs), both, strict=True)
        ]
        threads = [threading.Thread(target=trainer.train, daemon=True) for trainer in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return np.array([turns.seconds[WARM_UP_STEPS:] for turns in both]).T


def parts_of_steps(policy: str, arm: Arm, steps: int) -> np.ndarray:
    """Returns seconds on the clock, (steps, 2), of an arm's steps: those for advantages, and those for the loss."""
    alone, found = threading.Semaphore(1), []
    with tempfile.TemporaryDirectory() as output, isolated_random_state(seed=0):
        trainer = trainer_of(arm, policy, 4, steps, output, Turns(alone, alone, False))
        training_step = trainer.training_step

        def timed(*args, **kwargs):
            started = time.perf_counter()
            loss = training_step(*args, **kwargs)
            seconds = dict(trainer.seconds)
            trainer.seconds.clear()
            found.append((seconds["advantages"], time.perf_counter() - started - sum(seconds.values())))
            return loss

        trainer.training_step = timed
        trainer.train()
    return np.array(found[WARM_UP_STEPS:])


def ratio(pairs: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """Returns the ratio of the sums of two columns with its 95 % bootstrap interval over rows."""
    drawn = np.random.default_rng(0).integers(len(pairs), size=(resamples, len(pairs)))
    sums = pairs[drawn].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(pairs[:, 0].sum() / pairs[:, 1].sum()), float(low), float(high)


def quiet() -> None:
    """Keeps transformers from printing, and torch on one thread of a CPU."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", help="folder of a policy; default: the tiny one, warm-started on a case's task")
    parser.add_argument("--steps", type=int, default=40, help="counted steps of each, even: a cycle of updates is two")
    parser.add_argument("--cases", nargs="*", help=f"of {'; '.join(CASES)}; none: all")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--any-reward", action="store_true", help="for a policy that the tasks are too hard for")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    quiet()
    rows = []
    for name in arguments.cases or CASES:
        policy = arguments.policy or policy_of(CASES[name][1].task)
        pairs = side_by_side(policy, *CASES[name], arguments.steps, arguments.prompts, arguments.any_reward)
        found, low, high = ratio(pairs)
        ours, theirs = (statistics.mean(column) for column in pairs.T)
        rows.append({"case": name, "ours": ours, "theirs": theirs, "ratio": found, "low": low, "high": high})
        interval = f"{found:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{name}: {ours:.3f} / {theirs:.3f} s = {interval}, {len(pairs)} pairs", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
