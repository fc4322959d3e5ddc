"""Measures how processor seconds and memory of a step grow with group size, prompts, length, vocabulary and processes.

    python benchmarks/scaling.py [--only vocabulary ...]     # 10 minutes of a core
    python benchmarks/scaling.py --draw                      # the figure again, from its numbers

One factor is varied at a time around the sizes of `BASE`. Each point is a process of its own that trains an untrained
policy of the tiny architecture, whose responses almost all have full length and whose groups all have two rewards: no
rollout is left out of anything. Steps are plain ones (`lean_steps=false`), the only kind that several processes have,
in micro-batches of 16 rollouts. Seconds are those of the processor for the second step, without the optimizer's: other
programs stretch them less than those on the clock. Of several processes they are those of the first, without waiting.
Memory is the largest resident set less what was resident before the policy was built. All points are measured `REPEATS`
times in turns. An exponent is the slope of a line through all sizes on logarithmic axes, 1 where twice as much costs
twice as much; its interval is Student's over the repeats. Writes docs/figures/scaling.*.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
BASE = {"group_size": 4, "prompts": 8, "length": 64, "vocabulary": 4096, "processes": 1}
VARIED = {
    "group_size": (4, 8, 16, 32),
    "prompts": (8, 16, 32, 64),
    "length": (32, 64, 128, 256, 512),
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
PARTS = {"step": "#000000", "loss": "#009E73", "sampling": "#56B4E9", "advantages": "#E69F00"}
STEPS = 2  # the first one warms up
REPEATS = 3
ROLLOUTS_PER_FORWARD = 16
FIGURE = ROOT / "docs" / "figures" / "scaling"


def measure(point: dict[str, int]) -> dict[str, float]:
    """Returns the seconds of each part of a step, and its memory in MB, of this process."""
    import transformers

    from benchmarks.memory_model import random_policy, resident
    from otb import OTBConfig, OTBTrainer
    from otb.baselines.otb import otb
    from otb.policies.tiny_policy import build_tokenizer
    from otb.tasks.arithmetic import Arithmetic

    time.perf_counter = time.process_time  # the clock by which the trainer times its parts
    tokenizer = build_tokenizer()
    rollouts = point["prompts"] * point["group_size"] // point["processes"]
    forward = min(rollouts, ROLLOUTS_PER_FORWARD)
    before = resident("VmRSS")
    parts: list[dict[str, float]] = []

    class Timed(OTBTrainer):
        def training_step(self, *args, **kwargs):
            started = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            if "sampling" in self.seconds:  # the first micro-batch of a step samples for all of them
                parts.append({"sampling": 0.0, "advantages": 0.0, "step": 0.0})
            taken = dict(self.seconds)
            self.seconds.clear()
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
    last = parts[-1]
    last["loss"] = last["step"] - last["sampling"] - last["advantages"]
    return last | {"memory": (resident("VmHWM") - before) / 1e6}


def in_processes(point: dict[str, int]) -> dict[str, float]:
    """Returns what the first of several processes measures."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={point['processes']}"]
    command = [sys.executable, *launch, __file__, "--point", json.dumps(point)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def measure_all(factors: list[str]) -> pd.DataFrame:
    """Returns a row per factor, size and repeat: seconds of the parts of a step, and memory."""
    points = {json.dumps(BASE | {factor: size}): factor for factor in factors for size in VARIED[factor]}
    os.environ["PYTHONPATH"] = str(ROOT)
    server = get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.memory_model", "otb.training.trainer", "pandas"])
    rows = []
    with ProcessPoolExecutor(1, server, max_tasks_per_child=1) as pool:
        for repeat in range(REPEATS):
            for text, factor in points.items():
                point = json.loads(text)
                found = pool.submit(measure, point).result() if point["processes"] == 1 else in_processes(point)
                measured = f"{found['step']:.3f} s, {found['memory']:,.0f} MB"
                print(f"{NAMES[factor]} {point[factor]:,}: {measured}", flush=True)
                for varied in factors if point == BASE else [factor]:
                    rows.append({"factor": varied, "size": point[varied], "repeat": repeat, **found})
    rows.sort(key=lambda row: (factors.index(row["factor"]), row["size"], row["repeat"]))
    return pd.DataFrame(rows)


def exponent(part: pd.DataFrame, measured: str) -> tuple[float, float, float]:
    """Returns the slope on logarithmic axes through all sizes, the mean over the repeats, with its 95 % interval."""
    from scipy import stats

    of_repeat = [np.polyfit(np.log(rows["size"]), np.log(rows[measured]), 1)[0] for _, rows in part.groupby("repeat")]
    middle, half = np.mean(of_repeat), stats.t.ppf(0.975, len(of_repeat) - 1) * stats.sem(of_repeat)
    return float(middle), float(middle - half), float(middle + half)


def in_words(interval: tuple[float, float, float]) -> str:
    """Returns "1.00 [0.95, 1.06]", with the sign that figures have."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval).replace("-", "\N{MINUS SIGN}")


def draw(table: pd.DataFrame):
    """Draws a column per factor: seconds of a step and its parts above, memory below, exponents as titles."""
    from analysis.style import PAGE, keep_numbers, plt

    factors = list(dict.fromkeys(table.factor))
    figure, axes = plt.subplots(2, len(factors), figsize=(PAGE, 3.6), sharey="row", sharex="col", squeeze=False)
    for column, factor in enumerate(factors):
        part = table[table.factor == factor]
        sizes = np.array(sorted(part["size"].unique()))
        for panel, shown in zip(axes[:, column], (PARTS, {"memory": "#882255"}), strict=True):
            for name, tint in shown.items():
                panel.plot(sizes, part.groupby("size")[name].mean(), color=tint, lw=1.0, label=name)
                panel.plot(part["size"], part[name], "o", ms=2, color=tint)
            first = next(iter(shown))
            at_first = part[first][part["size"] == sizes[0]].mean()
            straight = at_first * (sizes[0] / sizes if factor == "processes" else sizes / sizes[0])
            panel.plot(sizes, straight, ":", color="0.45", lw=0.9, label="in proportion")
            panel.set(xscale="log", yscale="log")
            panel.minorticks_off()
            panel.set_title(in_words(exponent(part, first)), fontsize=7)
        below = axes[1, column]
        below.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=6)
        below.set_xlabel(NAMES[factor], fontsize=7)
    axes[0, 0].set_ylabel("processor seconds a step", fontsize=7)
    axes[1, 0].set_ylabel("memory, MB", fontsize=7)
    axes[1, 0].set_yticks([250, 500, 1000, 2000, 4000], ["250", "500", "1,000", "2,000", "4,000"])
    lines = {name: line for panel in axes[:, 0] for line, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    title = f"{table.repeat.nunique()} repeats (dots); above each panel the exponent of step or memory, 95 % interval"
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), title=title, title_fontsize=7)
    keep_numbers(axes, table)
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(VARIED), choices=list(VARIED), help="print; write nothing")
    parser.add_argument("--draw", action="store_true", help="draw scaling.csv and measure nothing")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        found = measure(arguments.point)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)
        return
    table = pd.read_csv(FIGURE.with_suffix(".csv")) if arguments.draw else measure_all(arguments.only)
    if set(arguments.only) == set(VARIED):
        from analysis.style import save

        save(draw(table.round(4)), FIGURE)
    for factor, part in table.groupby("factor", sort=False):
        print(f"{factor}:", "; ".join(f"{name} {in_words(exponent(part, name))}" for name in (*PARTS, "memory")))


if __name__ == "__main__":
    main()
