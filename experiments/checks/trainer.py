"""Checks of the keys of `trainer` and of `parallel.trainer`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from experiments.checks.choices import check_keys_of_choice
from experiments.checks.values import check_choice, check_known, check_numbers
from experiments.running import trackers
from experiments.running.fields import trainer_fields
from experiments.running.grpo_options import DERIVED, FIXED, typed
from otb.errors import RunError
from otb.values import Rule

CHOICES = {  # keys of trainer, of which TRL refuses others at its first step
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
SHARE = Rule("in (0, 1]", lambda value: 0 < value <= 1, "1.0")
NUMBERS = {  # keys of trainer
    **dict.fromkeys(
        (
            *("beta", "weight_decay", "max_grad_norm", "warmup_steps", "epsilon", "epsilon_high", "delta", "top_k"),
            *("min_p", "repetition_penalty", "adam_beta1", "adam_beta2", "adam_epsilon", "entropy_coef"),
            *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
        ),
        Rule("a number >= 0", lambda value: value >= 0, 0, optional=True),
    ),
    # of the probability; of the tokens that learn
    **dict.fromkeys(("top_p", "top_entropy_quantile"), SHARE),
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
    check_numbers(cfg, {f"trainer.{key}": rule for key, rule in NUMBERS.items() if key in cfg.trainer})
    for key, choices in CHOICES.items():
        if key in cfg.trainer:
            check_choice(f"trainer.{key}", cfg.trainer[key], choices)
    for key in CONTINUOUS_BATCHING:
        if cfg.trainer.get(key) and cfg.model.dtype == "bfloat16":
            raise RunError(
                f"trainer.{key}={typed(cfg.trainer[key])} with model.dtype=bfloat16: TRL would round the weights "
                "that are trained to bfloat16 at the first rollout. Use rollouts_by=vllm, or model.dtype=float32."
            )
    trackers.refuse_unknown(cfg)


def check_parallel_and_sampler(cfg: DictConfig) -> None:
    """Raises RunError for keys of `parallel` and `rollouts_by` that their choices do not read, or that contradict them.

    `parallel.trainer` must shard as `parallel` says: neither in another way nor not at all.
    """
    check_keys_of_choice(cfg, "parallel")
    check_keys_of_choice(cfg, "rollouts_by")
    options, name = cfg.parallel.trainer, cfg.parallel.name
    for key, choice in SHARDING.items():
        if key in options and name != choice:
            raise RunError(
                f"parallel.trainer.{key}={typed(options[key])} is for parallel={choice}, and parallel={name} would not "
                f"use it. Use parallel={choice}, or leave it out."
            )
    for key in ("fsdp", "deepspeed"):
        if name == SHARDING[key] and not options.get(key):
            raise RunError(
                f"parallel.trainer.{key}={typed(options.get(key))} would keep the whole policy on every GPU, under the "
                f"name of parallel={name}. Leave it out, or use parallel=ddp."
            )
    fsdp_config = options.get("fsdp_config") or {}
    check_known("parallel.trainer.fsdp_config", fsdp_config, FSDP2_KEYS, "key that FSDP2 reads")
    for key in options.keys() & cfg.trainer.keys():
        raise RunError(
            f"trainer.{key} is set by parallel={name}, which would replace it. Set parallel.trainer.{key} instead."
        )
    _check_options("parallel.trainer", {key: value for key, value in options.items() if key not in SHARDING})


def _check_options(group: str, options: Mapping[str, Any]) -> None:
    fields = trainer_fields()
    for key, value in options.items():
        if key in FIXED:
            raise RunError(f"{group}.{key}={value} cannot be set: {FIXED[key]}. Leave it out.")
        if key in DERIVED:
            raise RunError(f"{group}.{key}={value} follows from the run's own keys; set {DERIVED[key]} instead.")
        check_known(group, [key], fields, "option of trl.GRPOConfig", "")
        if value is None and not fields[key]:
            raise RunError(f"{group}.{key}=null must have a value. Leave it out for TRL's own.")
