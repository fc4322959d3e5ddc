"""Merges LoRA adapters, such as checkpoints of a run with `model.lora`, into the weights of their base, once.

`describe_policy` and `policy_folder` (models.py) call it for a folder that holds an adapter; everything after them,
including vLLM and checkpoints, sees an ordinary transformers folder in float32.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb.errors import first_line
from otb.files import sha256_of
from otb.policies.folders import ADAPTER, made_once, write_policy
from otb.policies.tiny_warm_start import default_cache_dir

FILES = (ADAPTER, "adapter_model.*", "tokenizer*", "chat_template*")  # files of the adapter that are read


def merged(folder: Path, base: str, revision: str | None, base_facts: dict) -> Path:
    """Returns a folder with the merged weights and their tokenizer, from the cache or newly made.

    folder: the adapter's. base, revision: its base, a folder or hub id. base_facts: the base's `model_facts`. Hashes of
    both are the key of the cache. Raises ValueError if they do not fit together, RunError if the cache cannot be
    written.
    """
    files = sorted(file for pattern in FILES for file in folder.glob(pattern))
    record = {"adapter": str(folder), "sha256": {file.name: sha256_of(file) for file in files}, "base": base_facts}
    digest = hashlib.sha256(json.dumps([record["sha256"], base_facts], sort_keys=True).encode()).hexdigest()
    merged = default_cache_dir() / f"adapter-{folder.name}-{digest[:16]}"
    return made_once(merged, lambda: write_policy(merged, *_load(folder, base, revision), record))


def _load(folder: Path, base: str, revision: str | None) -> tuple[Any, Any]:
    """Returns model and tokenizer of an adapter; without its own tokenizer, the tokenizer of the base."""
    own = (folder / "tokenizer_config.json").exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if own else base, revision=None if own else revision)
        model = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype=torch.float32)
        with warnings.catch_warnings():
            # a warning would leave weights that the file lacks at their initial values, which change nothing
            warnings.filterwarnings("error", message=".*missing adapter keys")
            return PeftModel.from_pretrained(model, folder).merge_and_unload(), tokenizer
    except Exception as error:  # weights of another model can cause any error in peft
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
