"""What the keys of `model` name: tokenizer, configuration and weights of the policy.

Called by every command that loads one: run.py, evaluate.py, variance.py and warm_start.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from experiments.prefetch import MODEL_FILES
from experiments.running.build import has_reference
from otb.errors import RunError, first_line
from otb.policies.folders import ADAPTER
from otb.policies.models import WEIGHT_FILES, describe_policy, policy_folder
from otb.tasks import Task


def described(cfg: DictConfig) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Returns tokenizer and configuration of the policy in `cfg.model`, by `describe_policy`."""
    model = cfg.model
    return describe_policy(model.name, model.revision, model.get("chat_template"), model.get("gguf_file"))


def weights_folder(cfg: DictConfig, task: Task, progress: Callable[[int, int, float], None]) -> str:
    """Returns folder or hub id of the weights of `cfg.model`, by `policy_folder`. progress: of the tiny warm start."""
    model = cfg.model
    recipe = dict(model.get("warm_start") or {})
    return policy_folder(model.name, task, recipe, progress, model.revision, model.get("gguf_file"))


def make_weights_folder(cfg: DictConfig, task: Task, progress: Callable[[int, int, float], None]) -> None:
    """Makes the folder of weights for several processes, before the trainer's options make them a group.

    In a group transformers writes a model on the first process alone, and under ZeRO-3 and FSDP it loads one in parts,
    all processes at once. The one that holds the folder's lock would write half of it, or wait for the others for ever.
    """
    if "WORLD_SIZE" in os.environ:
        weights_folder(cfg, task, progress)


def base_and_adapter(
    cfg: DictConfig, task: Task, checkpoint: Path | None, progress: Callable[[int, int, float], None]
) -> tuple[str, str | None]:
    """Returns folder or hub id of the whole policy, and the folder of the LoRA adapter on top of it or None.

    checkpoint: a folder with either; None for the weights of `cfg.model`. Raises RunError where it holds neither.
    """
    if checkpoint is None or (checkpoint / ADAPTER).exists():
        base = weights_folder(cfg, task, progress)
        return base, None if checkpoint is None else str(checkpoint)
    if not any(file for pattern in WEIGHT_FILES for file in checkpoint.glob(pattern)):
        raise RunError(
            f"{checkpoint} holds no weights that transformers can load ({', '.join(WEIGHT_FILES)}). Give a checkpoint "
            "with the whole policy or an adapter; the parts of a sharded one have to be put together first."
        )
    return str(checkpoint), None


def weights_dtype(cfg: DictConfig) -> str:
    """Returns the dtype to load the weights in; model.dtype is what the forward computes in.

    Weights that AdamW trains are float32: at a rate of 1e-6 most updates of a bfloat16 weight would round to nothing.
    Under LoRA the frozen weights need no such precision.
    """
    return cfg.model.dtype if cfg.model.get("lora") else "float32"


def lora_config(cfg: DictConfig) -> LoraConfig | None:
    """Returns the configuration of LoRA, None where `model.lora` is empty. Raises RunError for what peft refuses."""
    fields = OmegaConf.to_container(cfg.model, resolve=True).get("lora")
    if not fields:
        return None
    try:
        return LoraConfig(**({"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | fields))
    except (TypeError, ValueError) as error:
        raise RunError(f"model.lora: {error}") from error


def source_of(cfg: DictConfig, name: str) -> str:
    """Returns what to load the policy `name` from so that all that TRL loads by that name alone is of one revision.

    A local copy of `model.revision` where vLLM samples in these processes or there is a reference model; else `name`.
    Raises RunError without one.
    """
    revision, by_name_alone = cfg.model.revision, cfg.rollouts_by.name == "vllm" or has_reference(cfg)
    if not by_name_alone or revision is None or Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES)
    except (OSError, ValueError) as error:
        raise RunError(
            f"model.revision={revision} of {name} cannot be fetched into a folder, and vLLM or the reference model "
            f"would load another one: {first_line(error)}. With network, run: "
            f"python experiments/prefetch.py --model {name} --revision {revision}"
        ) from error
