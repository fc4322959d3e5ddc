"""Trains and writes the policy of experiments/warm_start.py, from a checked configuration."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers.trainer_utils import set_seed
from transformers.utils import get_json_schema

from experiments.running.devices import emulated_bfloat16
from experiments.running.environment import PACKAGES, commit, installed
from experiments.running.policy import described, lora_config, weights_dtype, weights_folder
from experiments.running.progress import Progress
from experiments.running.threads import use_threads
from experiments.running.train import quiet_libraries
from otb.errors import RunError
from otb.methods.tool_calls import check_tool_template
from otb.policies.folders import write_policy
from otb.policies.models import check_lora_targets, load_model, model_facts
from otb.policies.supervised import Supervision, supervised
from otb.tasks import Task
from otb.training.options import Batches


def make_policy(cfg: DictConfig, task: Task, output: Path, step: Batches, record: dict) -> dict:
    """Writes the policy to `output`, whole or not at all, and returns its record with what was measured.

    record: what is known already. Raises RunError where data, tokenizer or weights cannot be loaded.
    """
    quiet_libraries()
    chats = demonstrations(cfg, task)
    tokenizer, model_config = described(cfg)
    tools = None if task.environment is None else [get_json_schema(task.environment(None).python)]
    if tools is not None:
        check_tool_template(tokenizer, cfg.model.name)
    use_threads(cfg.threads, model_config)
    lora = lora_config(cfg)
    if lora is not None:
        check_lora_targets(lora, model_config)
    steps = cfg.steps or math.ceil(cfg.demonstrations / cfg.demonstrations_per_step)  # null: one pass
    with Progress(steps) as progress:
        on_cpu = cfg.use_cpu or not torch.cuda.is_available()
        progress.note(emulated_bfloat16(cfg.model.dtype, on_cpu))
        folder = weights_folder(cfg, task, progress.warm_start)
        set_seed(cfg.seed)  # LoRA's initial weights
        model = load_model(folder, cfg.model.revision, weights_dtype(cfg), cfg.model.get("attn_implementation"))
        bf16 = cfg.model.dtype == "bfloat16"
        how = Supervision(steps, step.forward, step.accumulation, cfg.learning_rate, cfg.seed, bf16, on_cpu)
        model, losses = supervised(model, tokenizer, chats, how, lora, progress.supervised, tools)
    record |= {
        **model_facts(folder, cfg.model.revision),
        "task": task.name,
        "demonstrations_sha256": hashlib.sha256(json.dumps(chats).encode()).hexdigest(),
        "losses": losses,
        "versions": {name: number for name in PACKAGES if (number := installed(name))},
        "commit": commit(),
    }
    write_policy(output, model, tokenizer, record)
    return record


def demonstrations(cfg: DictConfig, task: Task) -> list[list[dict]]:
    """Returns solved problems as chats that end with the solution. Raises RunError where there are too few."""
    if hasattr(task, "demonstrations"):
        chats = task.demonstrations(cfg.seed, cfg.demonstrations, cfg.noise)
        # The tiny policy's notice of tools; a real model's template writes one of its own.
        return [chat[1:] if chat[0]["role"] == "system" else chat for chat in chats]
    try:
        return task.solutions(cfg.seed, cfg.demonstrations)
    except (ValueError, FileNotFoundError) as error:
        raise RunError(str(error)) from error
