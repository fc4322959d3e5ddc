"""Policies by name: `tiny` (built here and warm-started), a hub id, or a local folder; all through one loader.

Called by experiments/. The tokenizer is loaded first, and what is wrong with it is said before the weights are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from otb.records import RunError
from otb.warm_start import WarmStart, warm_start

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny"


def policy_folder(name: str, task, recipe: dict, progress: Callable[[int, int, float], None] | None = None) -> str:
    """Where the policy's files are: `name` itself, or for "tiny" the warm-started folder, built if it is not cached.

    recipe: fields of `otb.warm_start.WarmStart`. A task without demonstrations gets the policy of `arithmetic`.
    """
    if name != TINY:
        return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    if not hasattr(task, "demonstrations"):
        from otb.tasks.arithmetic import Arithmetic

        task = Arithmetic()
    try:
        warm = WarmStart(**recipe)
    except (TypeError, ValueError) as error:
        raise RunError(f"model.warm_start: {error}") from error
    return str(warm_start(task, warm, progress=progress))


def load_tokenizer(folder: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Raises RunError where it cannot be loaded or has no chat template, which conversational prompts need."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, padding_side="left")
    except (OSError, ValueError) as error:
        raise RunError(f"model.name={folder}: {_missing(folder, revision, error)}") from error
    if tokenizer.chat_template is None:
        raise RunError(
            f"model.name={folder} has a tokenizer without a chat template, and prompts here are chat messages. Use the "
            "instruct variant, or save the tokenizer with a chat_template into a local folder."
        )
    return tokenizer


def load_model(folder: str, revision: str | None, dtype: str) -> PreTrainedModel:
    """The policy's weights. dtype: "float32", "bfloat16" or "float16". Raises RunError where they cannot be loaded."""
    try:
        return AutoModelForCausalLM.from_pretrained(folder, revision=revision, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise RunError(f"model.name={folder}: {_missing(folder, revision, error)}") from error


def model_facts(folder: str, revision: str | None) -> dict[str, str | None]:
    """Name and revision for environment.json: the commit for a hub model, nothing more for a folder."""
    config = AutoConfig.from_pretrained(folder, revision=revision)
    return {"model": folder, "model_revision": getattr(config, "_commit_hash", None) or revision}


def _missing(folder: str, revision: str | None, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0]
    if Path(folder).is_dir():
        return f"the folder cannot be read as a transformers model: {first_line}"
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    where = " --revision " + revision if revision else ""
    fetch = f"fetch it where there is network: python -m otb.prefetch --model {folder}{where}"
    return f"{'not in the local cache and HF_HUB_OFFLINE is set' if offline else first_line}; {fetch}"
