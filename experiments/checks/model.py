"""Checks of the keys of `model`. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

from huggingface_hub import constants
from omegaconf import DictConfig, OmegaConf

from experiments.checks.choices import keys_of_choices
from experiments.checks.values import check_choice, check_known
from experiments.prefetch import cached_file
from experiments.running.build import is_tiny
from experiments.running.command_line import CONF, near_miss
from experiments.running.fields import dataclass_fields
from experiments.running.threads import SMALL
from otb.errors import NOT_CACHED, RunError, no_model, not_from_the_hub
from otb.policies.folders import base_of

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
FLASH = {  # attention: the module and the package that transformers takes it from
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn", "flash-attn-4"),
}
CONFIGURATIONS = ("config.json", "adapter_config.json")  # a model has one of them
DTYPES = ("float32", "bfloat16")  # float16 weights cannot be trained: their gradients cannot be unscaled


def check_model(cfg: DictConfig) -> None:
    """Raises RunError for keys of `model` that name no policy, or that the one they name cannot be trained with."""
    known = {key for keys in keys_of_choices("model").values() for key in keys}
    check_known("model", cfg.model, known, "key of a model")
    if OmegaConf.is_missing(cfg.model, "name"):
        raise RunError("model.name is not set, and model=hub needs it. Add model.name=OWNER/NAME, or a folder.")
    check_choice("model.dtype", cfg.model.dtype, DTYPES, " Try model.dtype=float32.")
    name = str(cfg.model.name)
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise RunError(f"model.name={name} is not a folder. Give a folder of transformers files, a hub id or tiny.")
    files = [OmegaConf.load(path) for path in sorted((CONF / "model").glob("*.yaml"))]
    known = ["tiny", *(str(file.name) for file in files if "name" in file and not OmegaConf.is_missing(file, "name"))]
    if name not in known and near_miss(name, known) and not Path(name).is_dir() and "/" not in name:
        raise RunError(f"model.name={name} is no folder and no hub id (OWNER/NAME).{near_miss(name, known)}")
    base_of(Path(name).expanduser())  # an adapter's, which must be there
    _check_tiny(cfg)
    _check_revision(cfg)
    _check_gguf(cfg)
    _check_chat_template(cfg)
    _check_attention(cfg.model.get("attn_implementation"))
    recipe = dataclass_fields("otb.policies.tiny_warm_start", "WarmStart")
    check_known("model.warm_start", cfg.model.get("warm_start") or {}, recipe, "field of WarmStart")
    _check_lora(cfg.model.get("lora") or {})


def _check_tiny(cfg: DictConfig) -> None:
    """Refuses what the tiny policy would ignore, and its settings for a larger policy: 3e-4 would destroy it."""
    name = str(cfg.model.name)
    if name == "tiny":
        for key in ("revision", "chat_template"):
            if (value := cfg.model.get(key)) is not None:
                raise RunError(
                    f"model.{key}={value} would be ignored: model.name=tiny is built here, with a tokenizer of its "
                    "own. Leave it out, or use model=hub model.name=OWNER/NAME."
                )
        return
    if not is_tiny(cfg.model):
        return
    base = base_of(Path(name).expanduser())
    config = Path(name if base is None else base.name).expanduser() / "config.json"
    try:
        width = json.loads(config.read_text(encoding="utf8")).get("hidden_size", math.inf)
    except (OSError, ValueError):  # a hub id, or a folder whose problem is told when it is loaded
        width = 0 if config.parent.is_dir() else math.inf
    if width > SMALL:
        raise RunError(
            f"model.name={name} would get the settings of model=tiny: learning rate {cfg.model.learning_rate}, "
            f"{cfg.model.dtype}. They suit hidden sizes up to {SMALL}. Use model=hub model.name={name}."
        )


def _check_revision(cfg: DictConfig) -> None:
    name, revision = str(cfg.model.name), cfg.model.get("revision")
    if revision is not None and Path(name).expanduser().is_dir():
        raise RunError(
            f"model.revision={revision} would be ignored: model.name={name} is a folder, and revisions are of the hub. "
            "Leave it out, or give a hub id as model.name."
        )


def _check_chat_template(cfg: DictConfig) -> None:
    template = cfg.model.get("chat_template")
    if template not in (None, "plain") and not Path(str(template)).expanduser().is_file():
        raise RunError(
            f"model.chat_template={template} is no file. Give a jinja file, plain, or null for the tokenizer's own."
        )


def _check_attention(name: str | None) -> None:
    """Raises RunError for what transformers does not know, or has no package for."""
    if name is None:
        return
    if "/" not in str(name):
        others = " null is transformers' own choice, OWNER/NAME a kernel of the hub."
        check_choice("model.attn_implementation", name, ATTENTION, others)
    module, package = ("kernels", "kernels") if "/" in name else FLASH.get(name, ("transformers", ""))
    if importlib.util.find_spec(module) is None:
        how = " --no-build-isolation" if name == "flash_attention_2" else ""
        raise RunError(
            f"model.attn_implementation={name} needs the package {package}. Run: pip install {package}{how}, or use "
            "model.attn_implementation=sdpa."
        )


def _check_gguf(cfg: DictConfig) -> None:
    name, file = str(cfg.model.name), cfg.model.get("gguf_file")
    folder = Path(name).expanduser()
    files = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
    if file is None:
        if files and not (folder / "config.json").exists():
            raise RunError(
                f"model.name={name} holds no config.json of transformers, but {', '.join(files)}. Add "
                f"model.gguf_file={files[0]}."
            )
        if name != "tiny" and folder.is_dir() and not any((folder / file).is_file() for file in CONFIGURATIONS):
            raise no_model(name, "it has no config.json")
        return
    if name == "tiny" or is_tiny(cfg.model):
        raise RunError(
            f"model.gguf_file={file} of model.name={name} would be read with the settings of model=tiny. Use model=hub "
            "model.name=FOLDER_OR_HUB_ID, where the file is."
        )
    if importlib.util.find_spec("gguf") is None:
        raise RunError(f"model.gguf_file={file} needs the package gguf. Run: pip install -e '.[gguf]'")
    if folder.is_dir() and not (folder / str(file)).is_file():
        raise RunError(f"model.gguf_file={file} is not in {name}.{near_miss(file, files)} There: {files}.")


def _check_lora(lora) -> None:
    fields = dataclass_fields("peft.tuners.lora.config", "LoraConfig") | dataclass_fields("peft.config", "PeftConfig")
    usual = "The usual ones: r, lora_alpha, lora_dropout, target_modules."
    check_known("model.lora", lora, fields, "field of peft.LoraConfig", usual)
    if lora and lora.get("r") is None:
        raise RunError(f"model.lora.{next(iter(lora))} is set without a rank. Add model.lora.r=16.")
    if "r" in lora and (type(lora.r) is not int or lora.r < 1):
        raise RunError(f"model.lora.r={lora.r} must be a whole number of at least 1. Try model.lora.r=16.")


def check_model_is_here(cfg: DictConfig) -> None:
    """Raises RunError with HF_HUB_OFFLINE for a hub id whose small files are not in the cache of this machine."""
    name, revision, gguf = str(cfg.model.name), cfg.model.revision, cfg.model.get("gguf_file")
    if name == "tiny" or not constants.HF_HUB_OFFLINE or Path(name).expanduser().is_dir():
        return
    files = CONFIGURATIONS if gguf is None else (gguf,)
    if not any(cached_file(name, file, revision) for file in files):
        raise not_from_the_hub(name, revision, NOT_CACHED)
