"""Unpacks a GGUF file, llama.cpp's quantised format, into an ordinary transformers folder in float32, once.

`describe_policy` and `policy_folder` (models.py) call it for `model.gguf_file`; everything after them, including vLLM
and checkpoints, sees only the folder.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb.errors import first_line
from otb.files import sha256_of
from otb.policies.folders import made_once, write_policy
from otb.policies.tiny_warm_start import default_cache_dir


def unpacked(name: str, revision: str | None, gguf_file: str) -> Path:
    """Returns a folder with the float32 weights and the tokenizer of a GGUF file, from the cache or newly made.

    name: the folder or hub id that holds the file. The file's hash is the key of the cache. Raises OSError or
    ValueError if the file cannot be read, RunError if the cache cannot be written.
    """
    folder = Path(name).expanduser()
    path = folder / gguf_file if folder.is_dir() else Path(hf_hub_download(name, gguf_file, revision=revision))
    digest = sha256_of(path)
    unpacked = default_cache_dir() / f"gguf-{path.stem}-{digest[:16]}"
    record = {"model": name, "revision": revision, "gguf_file": gguf_file, "sha256": digest}
    return made_once(unpacked, lambda: write_policy(unpacked, *_load(path), record))


def _load(path: Path) -> tuple[Any, Any]:
    """Returns model and tokenizer of a GGUF file, without the marks of a quantised model.

    transformers refuses to save a model that it has dequantised, so the weights are copied into a new one.
    """
    place = {"pretrained_model_name_or_path": os.fspath(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, padding_side="left")
        with contextlib.redirect_stderr(io.StringIO()):  # hides a progress bar that no setting turns off
            read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except Exception as error:  # a damaged file can cause any error in transformers' readers
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    return model, tokenizer
