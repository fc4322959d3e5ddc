"""Trains many configurations for a few steps and prints digests of each: of its weights, and of its log.

`python -m tests.support.parity OUT.json [CASE ...]` writes them into a file. On one machine they stay equal bit for bit
as long as training computes the same. tests/trainer/test_parity.py compares them with tests/data/parity.json.
"""

import copy
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOTrainer

from otb import OTBTrainer
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.grpo import grpo
from otb.baselines.otb import otb
from otb.baselines.otb_exact import otb_exact
from otb.baselines.rloo import rloo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.improvement import PolicyImprovement
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights
from otb.policies.tiny_policy import build_model, build_tokenizer
from otb.sandbox import Result, Sandbox
from otb.tasks.python_tool import PythonTool
from tests.support.commands import ROOT, arguments, of_two_processes
from tests.support.trainers import byte_reward, config, dataset

REFERENCE = "trl"  # TRL's own trainer: where its digest differs, the machine computes other bits
TWO_BATCHES = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
COPY = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
EVERYTHING = {
    "token_weights": TokenWeights("entropy_reduction"),
    "improvement": PolicyImprovement("constant", window=2),
    "lr_schedule": LengthTriggeredDecay(warmup=1, ratio=1.01, baseline_steps=1),
}
ARCA = {"token_weights": TokenWeights("arca"), "peft_config": LoraConfig(target_modules="all-linear")}
MTP = MultiTokenPrediction
# name -> options of `config`, beside them the arguments of the trainer: baseline, and `given` by name
TRAININGS = {
    "otb": {"baseline": otb},
    "otb lean": {"baseline": otb, "lean_steps": True},
    "grpo dapo": {"baseline": grpo, "loss_type": "dapo", "lean_steps": True},
    "trajectory cv": {"baseline": TrajectoryCV(), "lean_steps": True},
    "probe lean": {"baseline": EnergyProbe(pseudo_rollouts=10.0), "lean_steps": True},
    "exact": {"baseline": otb_exact},
    "kl": {"baseline": otb, "beta": 0.1, "num_iterations": 2, "max_steps": 4, "lean_steps": True},
    "noise": {"baseline": otb, "measure_gradient_noise": True, "lean_steps": True, **TWO_BATCHES},
    "pipo": {"baseline": otb, "given": {"improvement": PolicyImprovement("constant", window=2)}, "max_steps": 5}
    | TWO_BATCHES,
    "pipo rloo": {
        "baseline": rloo,
        "given": {"improvement": PolicyImprovement("pipo", window=2, advantages="scaled")},
        "max_steps": 5,
    },
    "mtp": {"baseline": rloo, "given": {"auxiliary": MTP("occ")}, "num_iterations": 2, "max_steps": 4},
    "mtp noise": {
        "baseline": otb,
        "given": {"auxiliary": MTP("policy")},
        "measure_gradient_noise": True,
        **TWO_BATCHES,
    },
    "weights": {
        "baseline": otb,
        "given": {"token_weights": TokenWeights("surprisal", normalise="running")},
        "lean_steps": True,
        "max_steps": 3,
    },
    "arca": {"baseline": otb, "given": ARCA, "lean_steps": True, "max_steps": 3},
    "schedule": {"baseline": rloo, "given": {"lr_schedule": EVERYTHING["lr_schedule"]}, "max_steps": 4},
    "copy": {"baseline": otb, "sampler_dtype": "bfloat16", "geometric_ratio_band": (0.9, 1.1), "max_steps": 3, **COPY},
    "copy lean": {"baseline": otb, "sampler_dtype": "bfloat16", "lean_steps": True, "max_steps": 3, **COPY},
    "all": {"baseline": otb, "given": EVERYTHING, "measure_gradient_noise": True, "max_steps": 5, **TWO_BATCHES},
    "resumed": {
        "baseline": EnergyProbe(pseudo_rollouts=10.0),
        "given": {"token_weights": TokenWeights("surprisal", normalise="running")},
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "resume": 2,
    },
    "resumed pipo": {
        "baseline": otb,
        "given": {"improvement": PolicyImprovement("constant", window=2)},
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "resume": 2,
    },
    "tools": {"baseline": otb, "tools": True, "max_steps": 3, "lean_steps": True},
    "tools weights": {"baseline": otb, "tools": True, "given": {"token_weights": TokenWeights("surprisal")}},
}
RUNS: dict[str, dict] = {  # of experiments/run.py: changes of tests.support.commands.SHORT_RUN
    "run": {"baseline": "otb"},
    "run tools": {
        "task": "arithmetic_tools",
        "task__max_completion_length": 72,
        "task___target_": "otb.tasks.arithmetic_tools.ArithmeticTools",
        "sandbox": "unsafe_subprocess",
    },
    "run resumed": {"baseline": "energy_probe"},
    "run of two processes": {"log_energy": "true"},
}


class Answering(Sandbox):
    """Answers every program with its own length."""

    def __init__(self):
        super().__init__(workers=1)

    def _attempt(self, codes, limits):
        return [Result("ok", str(len(code)), "", 0.25) for code in codes]

    def check(self):
        pass


def turns(self, prompt_ids, *args, **kwargs):
    """Replaces the policy's turns: the ids so far determine one call, two calls, or an answer."""
    said = []
    for ids in prompt_ids:
        draw = random.Random(sum(ids) + 31 * len(ids) + len(said))
        programs = [f"print({draw.randrange(99)})" for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        calls = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in programs]
        text = "".join(f"<tool_call>{one}</tool_call>" for one in calls) or f"\\boxed{{{draw.randrange(99)}}}"
        said.append(self._tokenizer(text + "<|im_end|>")["input_ids"])
    return said, None


def fresh(folder: str | Path, tokenizer, ending: bool):
    """Writes an untrained tiny policy to the folder and returns it. ending: every tenth token ends a response."""
    torch.manual_seed(0)
    model = build_model(tokenizer, seed=0)
    if ending:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, len(tokenizer), 10)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def digest(value) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(text).hexdigest()[:12]


def without_times(row: dict) -> dict:
    times = re.compile("time|second|per_second|memory")
    return {name: value for name, value in row.items() if not times.search(name)}


def training(name: str, folder: str) -> list[str]:
    """Returns the digests of the weights and the log of one training."""
    tokenizer = build_tokenizer()
    case = copy.deepcopy(TRAININGS.get(name, {}))
    given, resume, with_tools = case.pop("given", {}), case.pop("resume", None), case.pop("tools", False)
    if "baseline" in case:
        given["baseline"] = case.pop("baseline")
    sampling = GRPOTrainer._generate_single_turn
    if with_tools:
        given |= {"environment_factory": partial(PythonTool, Answering())}
        case |= {"max_completion_length": 120, "max_tool_calling_iterations": 2}
        GRPOTrainer._generate_single_turn = turns
    kind = GRPOTrainer if name == REFERENCE else OTBTrainer
    try:
        for checkpoint in [None, f"{folder}/checkpoint-{resume}"] if resume else [None]:
            steps = {"max_steps": resume} if resume and checkpoint is None else {}
            model, arguments = fresh(f"{folder}/policy", tokenizer, not with_tools), config(folder, **(case | steps))
            others = copy.deepcopy(given)
            trainer = kind(model, byte_reward, arguments, dataset(), processing_class=tokenizer, **others)
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        GRPOTrainer._generate_single_turn = sampling
    weights = [
        parameter.detach().flatten() for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters()
    ]
    log = [without_times(row) for row in trainer.state.log_history]
    return [digest(torch.cat(weights).numpy().tobytes()), digest(log)]


def run(name: str, folder: str) -> list[str]:
    """Returns the digests of a run of experiments/run.py: last checkpoint, rows, evaluations and samples."""
    policy = Path(folder, "policy")
    fresh(policy, build_tokenizer(), True)
    for steps in (2, 6) if name == "run resumed" else (6,):
        given = arguments(Path(folder, "runs"), model__name=policy, **(RUNS[name] | {"steps": steps}))
        command = [sys.executable, str(ROOT / "experiments" / "run.py"), *given]
        started = []
        for variables in of_two_processes() if name == "run of two processes" else [{}]:
            environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(command, env=environment, cwd=folder, **pipes))
        printed = [process.communicate()[0] for process in started]
        assert not any(process.returncode for process in started), "\n".join(printed)
    (directory,) = (path.parent for path in Path(folder, "runs").rglob("metrics.jsonl"))
    kept = {}
    for file in sorted(directory.rglob("*.jsonl")):
        kept[file.name] = [without_times(json.loads(line)) for line in file.read_text().splitlines()]
    for file in sorted(directory.rglob("*.parquet")):
        kept[str(file.relative_to(directory))] = json.loads(pd.read_parquet(file).to_json(double_precision=15))
    weights = load_file(max(directory.glob("checkpoints/*/model.safetensors")))
    return [digest(b"".join(weights[key].numpy().tobytes() for key in sorted(weights))), digest(kept)]


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for name in names or (REFERENCE, *TRAININGS, *RUNS):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = (run if name in RUNS else training)(name, folder)
        print(name, *found[name], flush=True)
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
