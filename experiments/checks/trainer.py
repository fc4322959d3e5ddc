"""Checks of the keys of `trainer`, and which of them follow from the run's own keys. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from experiments.checks.values import typed
from experiments.running import trackers
from experiments.running.command_line import near_miss
from experiments.running.fields import trainer_fields
from otb.errors import RunError

CHOICES = {  # keys of trainer, of which TRL refuses others at its first step
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
SHARES = ("top_p", "top_entropy_quantile")  # of the probability; of the tokens that learn
NON_NEGATIVE = (  # keys of trainer
    "beta",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "epsilon",
    "epsilon_high",
    "delta",
    "top_k",
    "min_p",
    "repetition_penalty",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "entropy_coef",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)
# GRPOConfig keys that follow from the run's own keys, and what to set instead.
DERIVED = {
    "num_generations": "group_size",
    "per_device_train_batch_size": "model.rollouts_per_forward",
    "gradient_accumulation_steps": "model.rollouts_per_forward",
    "generation_batch_size": "prompts_per_step",
    "steps_per_generation": "prompts_per_step",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "seed": "seed",
    "learning_rate": "learning_rate",
    "temperature": "temperature",
    "max_completion_length": "task.max_completion_length",
    "max_tool_calling_iterations": "task.max_turns",
    "output_dir": "runs_dir",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "fsdp": "parallel",
    "fsdp_config": "parallel",
    "deepspeed": "parallel",
    "use_vllm": "rollouts_by",
    "vllm_mode": "rollouts_by",
    "vllm_tensor_parallel_size": "rollouts_by.tensor_parallel",
    "vllm_gpu_memory_utilization": "rollouts_by.memory_share",
    "vllm_enable_sleep_mode": "rollouts_by.sleep",
    "vllm_max_model_length": "task.max_completion_length",
    "vllm_server_base_url": "rollouts_by.url",
    "vllm_server_host": "rollouts_by.url",
    "vllm_server_port": "rollouts_by.url",
    "vllm_server_timeout": "rollouts_by.timeout_s",
    "model_init_kwargs": "nothing: TRL ignores it for a model that is loaded already; see model.*",
    "ignore_data_skip": "nothing: a resumed run continues where it stopped",
    "resume_from_checkpoint": "nothing: the same command resumes",
    "max_prompt_length": "max_prompt_length",
    "logging_nan_inf_filter": "nothing: a loss that is not finite stops the run",
    "save_only_model": "nothing: the last checkpoint must be one to resume from",
    "scale_rewards": "baseline",
    "save_steps": "checkpoint_every",
    "save_strategy": "checkpoint_every",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "eval_on_start": "nothing: every run is evaluated before its first step",
    "per_device_eval_batch_size": "model.rollouts_per_forward",
    "shuffle_dataset": "nothing: the order of the prompts follows from seed and epoch",
    "data_seed": "seed",
    "logging_steps": "nothing: every step is recorded",
    "logging_strategy": "nothing: every step is recorded",
    "num_generations_eval": "evaluation.samples",
    "train_sampling_strategy": "nothing: the order of the prompts follows from seed and epoch",
    "length_column_name": "nothing: the order of the prompts follows from seed and epoch",
    "label_smoothing_factor": "nothing: the loss of a policy has no labels",
    "trust_remote_code": "nothing: a model is loaded without code of its own",
    "save_total_limit": "nothing: the last checkpoint and the best are kept",
    "auto_find_batch_size": "model.rollouts_per_forward",
    "sync_ref_model": "nothing: a moving reference model is not in the checkpoints, so no run could be resumed",
}
CONTINUOUS_BATCHING = ("use_transformers_continuous_batching", "use_transformers_paged")  # an option by its two names
SHARDING = {"fsdp": "fsdp2", "fsdp_config": "fsdp2", "deepspeed": "zero3"}  # key of parallel.trainer: its `parallel`
FSDP2_KEYS = frozenset(  # of fsdp_config that transformers reads with version 2; it ignores any other
    {
        *("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "cpu_offload"),
        *("reshard_after_forward", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing"),
    }
)


def check_trainer(cfg: DictConfig) -> None:
    """Raises RunError for keys of `trainer` that TRL does not know, or whose values it would stumble over later."""
    _check_options("trainer", cfg.trainer)
    for key in NON_NEGATIVE:
        value = cfg.trainer.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise RunError(f"trainer.{key}={value} must be a number >= 0. Try trainer.{key}=0.")
    for key, choices in CHOICES.items():
        value = cfg.trainer.get(key)
        if key in cfg.trainer and value not in choices:
            raise RunError(f"trainer.{key}={value} is not one of {', '.join(choices)}.{near_miss(value, choices)}")
    for key in SHARES:
        share = cfg.trainer.get(key, 1.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise RunError(f"trainer.{key}={share} must be in (0, 1]. Try trainer.{key}=1.0.")
    for key in CONTINUOUS_BATCHING:
        if cfg.trainer.get(key) and cfg.model.dtype == "bfloat16":
            raise RunError(
                f"trainer.{key}={typed(cfg.trainer[key])} with model.dtype=bfloat16: TRL would round the weights "
                "that are trained to bfloat16 at the first rollout. Use rollouts_by=vllm, or model.dtype=float32."
            )
    trackers.refuse_unknown(cfg)


def check_parallel_trainer(cfg: DictConfig) -> None:
    """Raises RunError for keys of `parallel.trainer` that are no options, or that shard another way than `parallel`.

    Another way is not at all, too.
    """
    options, name = cfg.parallel.trainer, cfg.parallel.name
    for key, choice in SHARDING.items():
        if key in options and name != choice:
            raise RunError(
                f"parallel.trainer.{key}={typed(options[key])} is for parallel={choice}, and parallel={name} would not "
                f"train by it. Use parallel={choice}, or leave it out."
            )
    for key in ("fsdp", "deepspeed"):
        if name == SHARDING[key] and not options.get(key):
            raise RunError(
                f"parallel.trainer.{key}={typed(options.get(key))} would keep the whole policy on every GPU, under the "
                f"name of parallel={name}. Leave it out, or use parallel=ddp."
            )
    for key in options.get("fsdp_config") or {}:
        if key not in FSDP2_KEYS:
            raise RunError(
                f"parallel.trainer.fsdp_config.{key} is no key that FSDP2 reads.{near_miss(key, FSDP2_KEYS)} Keys: "
                f"{', '.join(sorted(FSDP2_KEYS))}."
            )
    for key in options.keys() & cfg.trainer.keys():
        raise RunError(
            f"trainer.{key} is set by parallel={name}, which would replace it. Set parallel.trainer.{key} instead."
        )
    _check_options("parallel.trainer", {key: value for key, value in options.items() if key not in SHARDING})


def _check_options(group: str, options: Mapping[str, Any]) -> None:
    fields = trainer_fields()
    for key, value in options.items():
        if key in DERIVED:
            raise RunError(f"{group}.{key}={value} follows from the run's own keys; set {DERIVED[key]} instead.")
        if key not in fields:
            raise RunError(f"{group}.{key} is no option of trl.GRPOConfig.{near_miss(key, fields)}")
        if value is None and not fields[key]:
            raise RunError(f"{group}.{key}=null must have a value. Leave it out for TRL's own.")
