"""Measures how seconds and memory of a step grow with group size, prompts, length, vocabulary and processes.

    python benchmarks/scaling.py [--only vocabulary ...]     # 4 minutes on two quiet cores

One factor is varied at a time around the sizes of `BASE`. Each point is a process of its own that trains an untrained
policy of the tiny architecture, whose responses almost all have full length and whose groups all have two rewards: no
rollout is left out of anything. Steps are plain ones (`lean_steps=false`), the only kind that several processes have,
in micro-batches of 16 rollouts. Seconds are the median of the steps after the first, without the optimizer's; memory is
the largest resident set less what was resident before the policy was built. An exponent is the slope between the two
largest points on logarithmic axes: 1 where twice as much costs twice as much. Writes scaling.csv and
build/scaling.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
BASE = {"group_size": 4, "prompts": 16, "length": 64, "vocabulary": 4096, "processes": 1}
VARIED = {
    "group_size": (4, 8, 16),
    "prompts": (8, 16, 32, 64),
    "length": (32, 64, 128, 256),
    "vocabulary": (1024, 4096, 16384),
    "processes": (1, 2),
}
NAMES = {
    "group_size": "group size N",
    "prompts": "prompts",
    "length": "tokens per response",
    "vocabulary": "vocabulary",
    "processes": "processes, same batch",
}
PARTS = {"sampling": "#56B4E9", "advantages": "#E69F00", "loss": "#009E73", "step": "#000000"}
STEPS = 3
ROLLOUTS_PER_FORWARD = 16
FACTS = ROOT / "benchmarks" / "scaling.csv"
FIGURE = ROOT / "build" / "scaling.png"


def measure(point: dict[str, int]) -> dict[str, float]:
    """Returns the seconds of each part of a step, and its memory in MB, of this process."""
    import transformers

    from benchmarks.memory_model import random_policy, resident
    from otb import OTBConfig, OTBTrainer
    from otb.baselines.otb import otb
    from otb.policies.tiny_policy import build_tokenizer
    from otb.tasks.arithmetic import Arithmetic

    tokenizer = build_tokenizer()
    rollouts = point["prompts"] * point["group_size"] // point["processes"]
    forward = min(rollouts, ROLLOUTS_PER_FORWARD)
    before = resident("VmRSS")
    parts: list[dict[str, float]] = []

    class Timed(OTBTrainer):
        def training_step(self, *args, **kwargs):
            started = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            if "sampling" in self._seconds:  # the first micro-batch of a step samples for all of them
                parts.append({"sampling": 0.0, "advantages": 0.0, "step": 0.0})
            taken = dict(self._seconds)
            self._seconds.clear()
            for name in ("sampling", "advantages"):
                parts[-1][name] += taken.get(name, 0.0)
            parts[-1]["step"] += time.perf_counter() - started
            return loss

    with tempfile.TemporaryDirectory() as output:
        arguments = OTBConfig(
            output_dir=output, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
            gradient_checkpointing=False, learning_rate=0.0, loss_type="dr_grpo", num_generations=point["group_size"],
            per_device_train_batch_size=forward, gradient_accumulation_steps=rollouts // forward,
            steps_per_generation=rollouts // forward, max_completion_length=point["length"], max_steps=STEPS,
            logging_steps=1, lean_steps=False,
        )  # fmt: skip
        trainer = Timed(
            random_policy("tiny", tokenizer, point["vocabulary"]),
            lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            arguments,
            Arithmetic().train_dataset(),
            processing_class=tokenizer,
            baseline=otb,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    middle = {name: statistics.median(step[name] for step in parts[1:]) for name in ("sampling", "advantages", "step")}
    middle["loss"] = middle["step"] - middle["sampling"] - middle["advantages"]
    return middle | {"memory": (resident("VmHWM") - before) / 1e6}


def in_processes(point: dict[str, int]) -> dict[str, float]:
    """Returns what the first of the processes of a point measures; they share the cores."""
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    if (count := point["processes"]) > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def exponent(values: pd.Series, sizes: pd.Series) -> float:
    """Returns the slope between the last two points on logarithmic axes."""
    (small, large), (first, second) = sizes.iloc[-2:], values.iloc[-2:]
    return float(np.log(second / first) / np.log(large / small))


def draw(table: pd.DataFrame):
    """Draws a column per factor: seconds of the parts of a step above, memory below, with the exponents at the ends."""
    from analysis.style import PAGE, plt

    factors = list(dict.fromkeys(table.factor))
    _, axes = plt.subplots(2, len(factors), figsize=(PAGE, 3.9), sharey="row", sharex="col", squeeze=False)
    for column, factor in enumerate(factors):
        part = table[table.factor == factor]
        above, below = axes[:, column]
        for name, tint in PARTS.items():
            slope = exponent(part[name], part["size"])
            above.plot(part["size"], part[name], marker="o", ms=3, color=tint, label=f"{name} {slope:.2f}")
        slope = exponent(part.memory, part["size"])
        below.plot(part["size"], part.memory, marker="o", ms=3, color="#882255", label=f"memory {slope:.2f}")
        for panel in (above, below):
            panel.set(xscale="log", yscale="log")
            panel.legend(fontsize=6, title="exponent", title_fontsize=6, loc="best", handlelength=1)
        below.set(xlabel=NAMES[factor], xticks=list(part["size"]), xticklabels=[f"{size:,}" for size in part["size"]])
        below.tick_params(axis="x", labelsize=6, rotation=45)
        below.minorticks_off()
    axes[0, 0].set_ylabel("seconds a step")
    axes[1, 0].set_ylabel("memory, MB")
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(VARIED), choices=list(VARIED))
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        found = measure(arguments.point)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)
        return
    rows = []
    for factor in arguments.only:
        for size in VARIED[factor]:
            found = in_processes(BASE | {factor: size})
            rows.append({"factor": factor, "size": size, **found})
            print(f"{NAMES[factor]} {size:,}: {found['step']:.3f} s, {found['memory']:,.0f} MB", flush=True)
    table = pd.DataFrame(rows)
    if set(arguments.only) == set(VARIED):
        from analysis.style import save

        table.to_csv(FACTS, index=False, float_format="%.4g")
        axes = draw(table)
        save(axes, FIGURE.with_suffix(""), ("png",))
    for factor, part in table.groupby("factor", sort=False):
        print(factor, {name: round(exponent(part[name], part["size"]), 2) for name in (*PARTS, "memory")})


if __name__ == "__main__":
    main()
