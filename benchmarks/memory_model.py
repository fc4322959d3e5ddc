"""Peaks of memory beside those that experiments/planning/memory.py predicts: the tables of docs/plan.md.

    python benchmarks/memory_model.py [--gpu] [--case NAME ...] [--json FILE]

Each case is a process of its own that trains two steps of OTBTrainer with random weights; the second is measured. A
peak is the largest resident set of this CPU (VmHWM of /proc/self/status), with --gpu the most that torch had allocated
there, set back at the beginning of each part of a step. What was held before the policy was built, and after another,
tiny one had been trained, does not count: it is the libraries'. malloc hands everything of 64 kB and more back at once
(MALLOC_MMAP_THRESHOLD_): what is resident is in use. Cases that cannot fit the GPU are left out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import ctypes
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.planning.architectures import FOLDER, architecture_of
from experiments.planning.memory import Step, moments
from experiments.running.devices import gpu_memory, visible_gpus
from otb import OTBConfig, OTBTrainer
from otb.methods import Method
from otb.policies.tiny_policy import build_tokenizer
from otb.tasks.arithmetic import Arithmetic

MEGABYTE = 1e6
SMOLLM = dict(model="HuggingFaceTB/SmolLM2-135M", rollouts=8, forward=4, response=96)
QWEN = dict(model="Qwen/Qwen2.5-1.5B", rollouts=32, forward=16, response=512, dtype="bfloat16", checkpointing=True)
CASES = {
    "tiny, 64 rollouts in one forward": dict(model="tiny", rollouts=64, forward=64, response=64),
    "tiny, in four forwards": dict(model="tiny", rollouts=128, forward=32, response=64),
    "SmolLM2, in two forwards": SMOLLM,
    "SmolLM2, in one forward, checkpointing": SMOLLM | dict(forward=8, checkpointing=True),
    "SmolLM2, bfloat16, in two forwards, checkpointing": SMOLLM | dict(checkpointing=True, dtype="bfloat16"),
    "SmolLM2, LoRA of rank 16, bfloat16, in two forwards": SMOLLM | dict(dtype="bfloat16", lora_rank=16),
}
GPU_CASES = {  # from a card of 24 GB to one of 80
    "Qwen2.5-0.5B, in two forwards": QWEN | dict(model="Qwen/Qwen2.5-0.5B"),
    "Qwen2.5-1.5B, LoRA of rank 32, in two forwards": QWEN | dict(lora_rank=32),
    "Qwen2.5-1.5B, in two forwards": QWEN,
}
WIDTHS = {"prompt": "prompt", "response": "completion"}  # of a Step -> of TRL's batch
PROMPT = 64  # tokens, more than an arithmetic prompt has: to tell which cases fit
ROOM = 0.9  # of a card, for what is predicted
PARTS = {  # what is measured -> the moments of experiments/planning/memory.py that it spans
    "sampling": ("sampling",),
    "extra pass": ("extra pass",),
    "forward and backward": ("LM head", "backward of a layer", "end of backward"),
    "update": ("update",),
}


class Meter:
    """Says how much memory this process holds: its resident set, on a GPU what torch has allocated there, in bytes."""

    def __init__(self, gpu: bool):
        self.gpu = gpu

    def held(self) -> int:
        """Returns what is held now, without garbage."""
        gc.collect()
        if self.gpu:
            return torch.cuda.memory_allocated()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return resident("VmRSS")

    def set_back(self) -> None:
        """Lets `peak` count from here on."""
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS from here on

    def peak(self) -> int:
        """Returns the most that was held since `set_back`."""
        return torch.cuda.max_memory_allocated() if self.gpu else resident("VmHWM")


def measure(case: dict, gpu: bool) -> dict:
    """Returns the peak of each part of the second step in bytes, and the widths of its batch."""
    small = CASES["tiny, 64 rollouts in one forward"] | {"rollouts": 8, "forward": 8}
    meter = Meter(gpu)
    train(small, meter, base=0)  # libraries start up
    return train(case, meter, base=meter.held())


def resident(field: str) -> int:
    """Returns VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peaks(Method, transformers.TrainerCallback):
    """A method that only watches: keeps the peak of each part of the latest step, and the widths of its batch.

    base: bytes that do not count.
    """

    def __init__(self, meter: Meter, base: int):
        self.meter, self.base = meter, base
        self.found: dict = {}

    def reached(self, name: str) -> None:
        peaks = self.found["peaks"]
        peaks[name] = max(peaks.get(name, 0), self.meter.peak() - self.base)

    @contextmanager
    def while_sampling(self):
        self.found["peaks"] = {}  # drops the peaks of the step before
        self.meter.set_back()
        yield

    def begin(self, output: dict) -> None:
        self.reached("sampling")
        self.found |= {part: output[f"{name}_ids"].size(1) for part, name in WIDTHS.items()}
        self.meter.set_back()

    def measured(self, step) -> None:
        self.reached("extra pass")

    def before_micro_batch(self) -> None:
        self.meter.set_back()

    def after_micro_batch(self, loss) -> None:
        self.reached("forward and backward")

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.meter.set_back()

    def on_optimizer_step(self, *args, **kwargs):
        self.reached("update")


def train(case: dict, meter: Meter, base: int) -> dict:
    """Trains two steps. Returns the peaks of the second above `base` bytes, and the widths of its batch."""
    peaks = Peaks(meter, base)
    tokenizer, lora_rank = build_tokenizer(), case.get("lora_rank")
    bfloat16 = case.get("dtype") == "bfloat16"
    with tempfile.TemporaryDirectory() as output:
        arguments = OTBConfig(
            output_dir=output, use_cpu=not meter.gpu, bf16=bfloat16, report_to="none", save_strategy="no",
            gradient_checkpointing=case.get("checkpointing", False), learning_rate=0.0, loss_type="dr_grpo",
            lean_steps=False, optim="adamw_torch", num_generations=4, per_device_train_batch_size=case["forward"],
            max_completion_length=case["response"], gradient_accumulation_steps=case["rollouts"] // case["forward"],
            steps_per_generation=case["rollouts"] // case["forward"], max_steps=2, logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        model = random_policy(case["model"], tokenizer)
        trainer = OTBTrainer(
            model.to(torch.bfloat16) if bfloat16 and lora_rank else model,
            lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            arguments,
            Arithmetic().train_dataset(),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=lora_rank, target_modules="all-linear") if lora_rank else None,
            callbacks=[peaks],
            methods=[peaks],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return peaks.found


def random_policy(name: str, tokenizer, vocabulary: int | None = None):
    """Returns an untrained float32 policy of the architecture; its vocabulary may be larger than the tokenizer's.

    vocabulary: None for the architecture's own.
    """
    file = next(f for f in FOLDER.glob("*.json") if f'"{name}"' in f.read_text())
    config = AutoConfig.for_model(**json.loads(file.read_text()))
    config.vocab_size = vocabulary or config.vocab_size
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return AutoModelForCausalLM.from_config(config)


def predict(case: dict, gpu: bool, prompt: int, response: int) -> dict[str, float]:
    """Returns the predicted peak of each part, in bytes, by the formulas of a GPU or of a CPU."""
    options = {name: case[name] for name in case if name in {field.name for field in dataclasses.fields(Step)}}
    options = {"dtype": "float32", "checkpointing": False} | options | {"prompt": prompt, "response": response}
    predicted = moments(Step(architecture=architecture_of(case["model"]), on_gpu=gpu, **options))
    return {part: max(sum(predicted[name].values()) for name in names) for part, names in PARTS.items()}


def fitting(memory: float) -> list[str]:
    """Returns the GPU_CASES that a card of so many bytes has room for."""
    needed = {name: max(predict(case, True, PROMPT, case["response"]).values()) for name, case in GPU_CASES.items()}
    return [name for name in GPU_CASES if needed[name] <= ROOM * memory]


def rows_of(name: str, gpu: bool) -> list[dict]:
    """Measures a case in a process of its own and returns a row for each part of the step."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[0]  # with several, torch would split the batches
    command = [sys.executable, __file__, "--child", name, *(["--gpu"] if gpu else [])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    widths = {key: measured[key] for key in ("prompt", "response")}
    predicted = predict((GPU_CASES if gpu else CASES)[name], gpu, **widths)
    return [
        {"case": name, "part": part, "measured": peak, "predicted": predicted[part], **widths}
        for part, peak in measured["peaks"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", action="store_true", help="measure what torch allocates on the GPU, of larger models")
    parser.add_argument("--case", nargs="*", choices=[*CASES, *GPU_CASES])
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--child", choices=[*CASES, *GPU_CASES], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = GPU_CASES if arguments.gpu else CASES
    if other := [name for name in [*(arguments.case or []), arguments.child] if name and name not in cases]:
        parser.error(f"--case {other[0]} is measured {'without' if arguments.gpu else 'with'} --gpu")
    if arguments.child:
        print(json.dumps(measure(cases[arguments.child], arguments.gpu)))
        return
    names = list(cases)
    if arguments.gpu:
        memory = gpu_memory()
        if memory is None:
            parser.error("--gpu: nvidia-smi shows no GPU here; leave --gpu out for the resident set of the CPU")
        names = fitting(memory)
    rows = []
    print("| case | part | measured, MB | predicted, MB | error |\n|---|---|---|---|---|")
    for name in arguments.case or names:
        for row in rows_of(name, arguments.gpu):
            rows.append(row)
            measured, predicted = row["measured"] / MEGABYTE, row["predicted"] / MEGABYTE
            print(f"| {name} | {row['part']} | {measured:,.0f} | {predicted:,.0f} | {predicted / measured - 1:+.0%} |")
        sys.stdout.flush()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
