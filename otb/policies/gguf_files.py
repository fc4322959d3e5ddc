"""Turns a GGUF file, the quantised form of llama.cpp, into an ordinary folder of transformers, once, in float32.

`describe_policy` and `policy_folder` (models.py) call it for `model.gguf_file`; whatever comes after them, vLLM and
checkpoints too, sees the folder alone.
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
    """Returns the folder with the weights of a GGUF file in float32 and its tokenizer, made if no cache holds it.

    name: the folder or hub id that the file is in. The cache goes by the file's hash. Raises OSError or
    ValueError where the file cannot be read, RunError where the cache cannot be written.
    """
    folder = Path(name).expanduser()
    path = folder / gguf_file if folder.is_dir() else Path(hf_hub_download(name, gguf_file, revision=revision))
    digest = sha256_of(path)
    unpacked = default_cache_dir() / f"gguf-{path.stem}-{digest[:16]}"
    record = {"model": name, "revision": revision, "gguf_file": gguf_file, "sha256": digest}
    return made_once(unpacked, lambda: write_policy(unpacked, *_load(path), record))


def _load(path: Path) -> tuple[Any, Any]:
    """Returns model and tokenizer of a GGUF file, the model free of what marks it as quantised.

    transformers refuses to save a model that it has dequantised, so its weights go into a new one.
    """
    place = {"pretrained_model_name_or_path": os.fspath(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, padding_side="left")
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers turns off
            read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except Exception as error:  # transformers' readers raise whatever a damaged file leads them to
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    return model, tokenizer
