"""Opens a sampler of the tiny policy on a task, for the scripts that look into single rollouts."""

from __future__ import annotations

from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

from experiments.running.build import build
from experiments.running.command_line import CONF
from otb.laboratory.sampling import Sampler
from otb.policies.models import TINY, load_model, policy_folder


class TinySampler(NamedTuple):
    """A task, the policy in evaluation mode, its tokenizer, and what samples it at temperature 1."""

    task: Any
    model: Any
    tokenizer: Any
    sampler: Sampler


def single_turn_task(name: str):
    """Returns a single-turn task of conf/task."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build(compose("config", [f"task={name}"]), "task")


def tiny_sampler(task, folder: str | None, scratch: str) -> TinySampler:
    """Opens the sampler of a task's policy. folder: of a checkpoint; None for the warm-started policy.

    scratch: a folder for what TRL writes. Raises RunError where the policy cannot be loaded.
    """
    folder = folder or policy_folder(TINY, task, {})
    model, tokenizer = load_model(folder, None, "float32").eval(), AutoTokenizer.from_pretrained(folder)
    return TinySampler(task, model, tokenizer, Sampler(model, tokenizer, task, None, 1.0, scratch))
