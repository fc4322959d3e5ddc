"""Refuses what `parallel` and `rollouts_by` cannot do with the processes of a run. Imports no torch."""

from __future__ import annotations

import importlib.util

from omegaconf import DictConfig

from experiments.checks.values import check_numbers, whole_number
from experiments.planning.memory import SAMPLES_HERE
from experiments.running.processes import counted
from otb.errors import RunError
from otb.values import Rule, is_positive

NUMBERS = {  # keys of rollouts_by; a choice has some of them
    "rows": whole_number(1, 64, "null for all"),
    "timeout_s": Rule("a positive number of seconds", is_positive, 240),
    "memory_share": Rule(
        "a number between 0 and 1, or null for what the trainer leaves, as vLLM shares a GPU with the policy",
        lambda value: 0 < value < 1,
        0.3,
        optional=True,
    ),
}


def check_processes(cfg: DictConfig, processes: int) -> None:
    """Raises RunError where the sharding or the sampler does not go with so many processes, or with tools."""
    _check_parallel(cfg.parallel.name, processes)
    node, with_tools = cfg.rollouts_by, cfg.task.get("max_turns") is not None
    check_numbers(cfg, {f"rollouts_by.{key}": rule for key, rule in NUMBERS.items() if key in node})
    if node.name in SAMPLES_HERE:
        _check_generate(cfg, with_tools)
    elif importlib.util.find_spec("vllm") is None:
        raise RunError(f"rollouts_by={node.name} needs the package vllm. Run: pip install -e '.[vllm]'")
    elif node.name == "vllm_server":
        _check_server(node, with_tools, processes)
    else:
        _check_vllm(node.tensor_parallel, with_tools, processes)


def _check_parallel(kind: str, processes: int) -> None:
    if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
        raise RunError("parallel=zero3 needs the package deepspeed. Run: pip install -e '.[deepspeed]'")
    if kind != "ddp" and processes < 2:
        raise RunError(
            f"parallel={kind} divides the policy over several processes, and this run has one. Add gpus=8, or use "
            "parallel=ddp."
        )


def _check_generate(cfg: DictConfig, with_tools: bool) -> None:
    """Refuses to let processes generate a different number of times where each time they gather weights together."""
    kind, name, rows = cfg.parallel.name, cfg.rollouts_by.name, cfg.rollouts_by.rows
    if kind != "ddp" and rows is not None:
        raise RunError(
            f"rollouts_by.rows={rows} lets processes generate a different number of times, and parallel={kind} has "
            "them gather weights together. Use rollouts_by=vllm, or rollouts_by.rows=null."
        )
    if kind != "ddp" and with_tools:
        raise RunError(
            f"rollouts_by={name} with tools: rollouts call Python a different number of times, and parallel={kind} has "
            "processes gather weights together for each token. Use rollouts_by=vllm, or parallel=ddp."
        )


def _check_server(node: DictConfig, with_tools: bool, processes: int) -> None:
    if not str(node.url).startswith(("http://", "https://")):
        raise RunError(
            f"rollouts_by.url={node.url} is no address of a server. Try rollouts_by.url=http://localhost:8000."
        )
    if with_tools and processes > 1:
        raise RunError(
            f"rollouts_by=vllm_server with tools on {processes} processes: rollouts call Python a different number of "
            "times, and TRL deals out what the server samples as if every process had asked for as much. Use "
            "rollouts_by=vllm, or one process."
        )


def _check_vllm(tensor_parallel: int | None, with_tools: bool, processes: int) -> None:
    divides = type(tensor_parallel) is int and tensor_parallel >= 1 and processes % tensor_parallel == 0
    if tensor_parallel is not None and not divides:
        raise RunError(
            f"rollouts_by.tensor_parallel={tensor_parallel} must be a whole number that divides the "
            f"{counted(processes)} of the run. Try rollouts_by.tensor_parallel=null for as few as hold the policy."
        )
    if tensor_parallel not in (None, 1) and with_tools:
        raise RunError(
            f"rollouts_by.tensor_parallel={tensor_parallel} with tools: processes that share a copy of the policy must "
            "ask it for the same number of turns, and rollouts call Python a different number of times. Use "
            "rollouts_by.tensor_parallel=1."
        )
