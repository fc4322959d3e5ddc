"""Translates keys of a run to options of trl.GRPOConfig, and back: what a refusal calls an option on the command line.

The checks ask before a model loads, train.py builds the trainer from the same options, and so does the evaluation.
Imports no torch.
"""

from __future__ import annotations

import os
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.planning.fit import vllm_gpus, vllm_share
from experiments.planning.memory import SAMPLES_HERE
from experiments.running import devices
from experiments.running.build import Run
from otb.refusals import NOW, Options

# Options of GRPOConfig that follow from a key of the run -> the key.
DERIVED: dict[str, str] = {
    option: key
    for key, options in {
        "group_size": "num_generations",
        "model.rollouts_per_forward": "per_device_train_batch_size per_device_eval_batch_size auto_find_batch_size "
        "gradient_accumulation_steps",
        "prompts_per_step": "generation_batch_size steps_per_generation",
        "steps": "max_steps num_train_epochs",
        "seed": "seed data_seed",
        "learning_rate": "learning_rate",
        "temperature": "temperature",
        "task.max_completion_length": "max_completion_length vllm_max_model_length",
        "task.max_turns": "max_tool_calling_iterations",
        "runs_dir": "output_dir",
        "model.dtype": "bf16 fp16",
        "parallel": "fsdp fsdp_config deepspeed",
        "rollouts_by": "use_vllm vllm_mode",
        "rollouts_by.tensor_parallel": "vllm_tensor_parallel_size",
        "rollouts_by.memory_share": "vllm_gpu_memory_utilization",
        "rollouts_by.sleep": "vllm_enable_sleep_mode",
        "rollouts_by.url": "vllm_server_base_url vllm_server_host vllm_server_port",
        "rollouts_by.timeout_s": "vllm_server_timeout",
        "max_prompt_length": "max_prompt_length",
        "baseline": "scale_rewards",
        "checkpoint_every": "save_steps save_strategy",
        "evaluation.every": "eval_steps eval_strategy",
        "evaluation.samples": "num_generations_eval",
    }.items()
    for option in options.split()
}
# Options of GRPOConfig that no run may set -> why.
FIXED: dict[str, str] = {
    option: reason
    for reason, options in {
        "TRL ignores it for a model that is loaded already; see model.*": "model_init_kwargs",
        "a resumed run continues where it stopped": "ignore_data_skip",
        "the same command resumes": "resume_from_checkpoint",
        "a loss that is not finite stops the run": "logging_nan_inf_filter",
        "the last checkpoint must be one to resume from": "save_only_model",
        "every run is evaluated before its first step": "eval_on_start",
        "the order of the prompts follows from seed and epoch": "shuffle_dataset train_sampling_strategy "
        "length_column_name",
        "every step is recorded": "logging_steps logging_strategy",
        "the loss of a policy has no labels": "label_smoothing_factor",
        "a model is loaded without code of its own": "trust_remote_code",
        "the last checkpoint and the best are kept": "save_total_limit",
        "a moving reference model is not in the checkpoints, so no run could be resumed": "sync_ref_model",
    }.items()
    for option in options.split()
}
# Options of OTBConfig, and arguments of OTBTrainer, that a run has under a key of its own.
OWN_KEYS = {
    **{name: name for name in ("log_energy", "measure_gradient_noise", "lean_steps", "geometric_ratio_band")},
    **{name: name for name in ("baseline", "token_weights", "improvement", "auxiliary")},
    "rows_per_generation": "rollouts_by.rows",
    "sampler_dtype": "rollouts_by",
    "lr_schedule": "schedule",
    "peft_config": "model.lora",
    "sharded": "parallel",
}


def typed(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return f"'[{','.join(map(typed, value))}]'"
    if isinstance(value, dict):
        return f"'{{{','.join(f'{key}:{typed(of)}' for key, of in value.items())}}}'"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


class RunOptions(Options):
    """Options in the words of a run's command line."""

    SAID = {
        ("sharded", True): "parallel=fsdp2 (or zero3)",
        ("sharded", False): "parallel=ddp",
        ("use_vllm", True): "rollouts_by=vllm",
        ("use_vllm", False): "rollouts_by=hf",
        ("sampler_dtype", None): "rollouts_by=hf",
        ("sampler_dtype", "bfloat16"): "rollouts_by=hf_bfloat16",
        ("bf16", True): "model.dtype=bfloat16",
        ("bf16", False): "model.dtype=float32",
        ("lr_schedule", None): "schedule=constant",
        ("token_weights", None): "token_weights=none",
        ("improvement", None): "improvement=none",
        ("auxiliary", None): "auxiliary=none",
        ("peft_config", "LoraConfig(...)"): "model.lora.r=16",
    }

    def key(self, name: str) -> str:
        option, dot, below = name.partition(".")
        key = OWN_KEYS.get(option) or DERIVED.get(option, f"trainer.{option}")
        return f"{key}{dot}{below}"

    def says(self, name: str, value: Any = NOW) -> str:
        if name == "use_vllm" and value is NOW and self.vllm_mode == "server":
            return "rollouts_by=vllm_server"
        return super().says(name, value)

    def written(self, value: Any) -> str:
        return typed(getattr(value, "mode", value))

    def batch(self, forward: int, accumulation: int) -> str:
        local = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if forward * accumulation > local:
            return f"prompts_per_step={4 * self.world_size}"
        return f"model.rollouts_per_forward={forward}"


def asked_by(run: Run) -> RunOptions:
    """Returns the options of a run as refusals read them."""
    cfg, lora = run.cfg, OmegaConf.to_container(run.cfg.model, resolve=True).get("lora")
    return RunOptions(
        **{
            **OmegaConf.to_container(cfg.trainer, resolve=True),
            **derived_options(run),
            **sampler_options(cfg),
            **run.methods,
            "baseline": run.baseline,
            "peft_config": lora,
            "sharded": False if cfg.parallel.name == "ddp" else cfg.parallel.name,
            "world_size": run.processes,
        }
    )


def derived_options(run: Run) -> dict[str, Any]:
    """Returns the options of GRPOConfig that follow from the run's keys; `trainer.*` may not set them."""
    cfg, step, task = run.cfg, run.step, run.task
    band = cfg.geometric_ratio_band
    return {
        "num_generations": cfg.group_size,
        "per_device_train_batch_size": step.forward,
        # independent of the group size, so that every arm of a comparison draws the same held-out samples
        "per_device_eval_batch_size": max(cfg.evaluation.samples, cfg.model.rollouts_per_forward or 128),
        "gradient_accumulation_steps": step.accumulation,
        "steps_per_generation": step.accumulation,
        "max_steps": cfg.steps,
        "seed": cfg.seed,
        "learning_rate": cfg.learning_rate,
        "temperature": cfg.temperature,
        "log_energy": cfg.log_energy,
        "lean_steps": cfg.lean_steps,
        "measure_gradient_noise": cfg.measure_gradient_noise,
        "rows_per_generation": cfg.rollouts_by.get("rows"),
        "geometric_ratio_band": tuple(band) if isinstance(band, ListConfig) else band,
        "max_completion_length": task.max_completion_length,
        # the last turn can only answer
        "max_tool_calling_iterations": None if task.environment is None else task.max_turns - 1,
        "bf16": cfg.model.dtype == "bfloat16",
        "fp16": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
    }


def sampler_options(cfg: DictConfig) -> dict[str, Any]:
    """Returns the options of GRPOConfig that say what samples: they follow from `rollouts_by` alone."""
    node = cfg.rollouts_by
    if node.name == "hf":
        return {}
    if node.name == "hf_bfloat16":
        return {"sampler_dtype": "bfloat16"}
    return {"use_vllm": True, "vllm_mode": "colocate" if node.name == "vllm" else "server"}


def machine_options(cfg: DictConfig) -> dict[str, Any]:
    """Returns the options of GRPOConfig that follow from `parallel`, `rollouts_by` and the GPUs of this machine."""
    options = OmegaConf.to_container(cfg.parallel.trainer, resolve=True) | sampler_options(cfg)
    node = cfg.rollouts_by
    if node.name == "vllm_server":
        return options | {"vllm_server_base_url": node.url, "vllm_server_timeout": float(node.timeout_s)}
    if node.name != "vllm":
        return options
    machine = devices.gpu_memory(), int(os.environ.get("WORLD_SIZE", 1))
    return options | {
        "vllm_tensor_parallel_size": vllm_gpus(cfg, *machine),
        "vllm_gpu_memory_utilization": vllm_share(cfg, *machine),
        "vllm_enable_sleep_mode": node.sleep and bool(devices.visible_gpus()),  # vLLM has no sleep on a CPU
    }


def sampling_limits(cfg: DictConfig, longest_prompt: int, stop_token_ids: list[int]) -> dict[str, Any]:
    """Returns the options of GRPOConfig that tell vLLM what rows and tokenizer need; none where it does not sample.

    longest_prompt: tokens of the longest prompt of the run. stop_token_ids: the tokens that end a rollout; vLLM knows
    only those of the model's own files.
    """
    if cfg.rollouts_by.name in SAMPLES_HERE:
        return {}
    generation = OmegaConf.to_container(cfg.trainer, resolve=True).get("generation_kwargs") or {}
    limits: dict[str, Any] = {"generation_kwargs": {"stop_token_ids": stop_token_ids} | generation}
    if cfg.rollouts_by.name == "vllm":  # else it would be the model's whole context, whose cache does not fit
        limits["vllm_max_model_length"] = longest_prompt + cfg.task.max_completion_length
    return limits
