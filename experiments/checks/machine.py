"""Refuses a run that this machine, or the launcher, cannot start as it is written. Imports no torch."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from experiments.running import devices
from experiments.running.processes import counted, starts_processes
from experiments.running.threads import check_threads
from otb.errors import RunError


def check_this_machine(cfg: DictConfig) -> None:
    """Raises RunError where this process cannot use the machine as the configuration wants. Loads nothing."""
    check_threads(cfg)
    gpus = [] if cfg.trainer.get("use_cpu") else devices.visible_gpus()
    if cfg.parallel.name != "ddp" and not gpus:
        raise RunError(
            f"parallel={cfg.parallel.name} divides the policy over GPUs, and no GPU is to be used here; it would train "
            "as plain data parallelism instead. Use parallel=ddp, or a machine with GPUs."
        )
    refuse_vllm_without_gpu(cfg, gpus)
    check_enough_gpus(cfg)
    if "WORLD_SIZE" not in os.environ and cfg.gpus is None and len(gpus) > 1:
        raise RunError(
            f"{len(gpus)} GPUs are visible to one process, among which torch would split its batches unasked. Use "
            f"gpus={len(gpus)} for all of them, or CUDA_VISIBLE_DEVICES=0 for one."
        )


def refuse_vllm_without_gpu(cfg: DictConfig, gpus: list[str]) -> None:
    """Raises RunError for vLLM in processes that use none of the GPUs."""
    if cfg.rollouts_by.name == "vllm" and not gpus:
        raise RunError(
            "rollouts_by=vllm samples on the GPUs that train, and none is to be used here: on a processor vLLM packs "
            "its weights, and those of the trainer never reach it. Use rollouts_by=hf, or a machine with GPUs."
        )


def check_enough_gpus(cfg: DictConfig) -> None:
    """Raises RunError where `gpus=N` asks for several processes and there are fewer GPUs."""
    here = devices.visible_gpus()
    if starts_processes(cfg) and not cfg.trainer.get("use_cpu") and len(here) < cfg.gpus:
        raise RunError(
            f"gpus={cfg.gpus} asks for more GPUs than are visible here ({len(here)}). Use gpus={max(1, len(here))}, or "
            "trainer.use_cpu=true to try several processes on the CPU."
        )


def check_gpus_of_launcher(cfg: DictConfig, processes: int) -> None:
    """Raises RunError where `gpus` is another number than the processes that SLURM's launcher starts for a run."""
    if cfg.gpus not in (None, processes):
        raise RunError(
            f"gpus={cfg.gpus} is not the {counted(processes)} that SLURM's launcher starts for a run, nodes x "
            f"tasks_per_node. Use gpus={processes} or gpus=null for those, or another launcher: "
            "hydra/launcher=slurm_8gpu starts 8, slurm_nodes 8 on each of hydra.launcher.nodes."
        )
