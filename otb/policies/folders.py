"""Writes folders of weights, and reads the base of an adapter from the adapter's folder.

The folders are ordinary transformers folders plus a record of their origin. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from otb.errors import RunError, first_line, unwritable
from otb.files import whole_folder

MADE_FROM = "made_from.json"  # the record of a folder's origin
WEIGHT_FILES = ("*.safetensors", "*.bin")
ADAPTER = "adapter_config.json"  # peft's; a checkpoint of a LoRA run has it instead of config.json


class Base(NamedTuple):
    """The weights that an adapter was trained on: a folder, or a hub id and its revision."""

    name: str
    revision: str | None


def base_of(folder: Path) -> Base | None:
    """Returns the base that an adapter's folder names; None if the folder holds no adapter.

    Raises RunError if the adapter is not a LoRA adapter, or if its base is a folder that does not exist.
    """
    file = folder / ADAPTER
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf8"))
        kind, base = config["peft_type"], Base(config["base_model_name_or_path"], config.get("revision"))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"model.name={folder} holds an {ADAPTER} that cannot be read: {type(error).__name__}: {first_line(error)}. "
            "It must be a file that peft wrote, with peft_type and base_model_name_or_path. Restore it."
        ) from error
    if kind != "LORA":
        raise RunError(
            f"model.name={folder} is an adapter of peft_type={kind}, but only LoRA adapters are merged into their "
            "base. Merge it yourself, and give the folder that save_pretrained writes."
        )
    is_path = str(base.name).startswith(("/", "./", "../", "~")) or str(base.name).count("/") > 1
    if base.name is None or (is_path and not Path(base.name).expanduser().is_dir()):
        raise RunError(
            f"model.name={folder} is an adapter of base_model_name_or_path={base.name}, which is not a folder. An "
            f"adapter needs the weights that it was trained on. Restore them, or write their path into {file}."
        )
    return base


def made_once(folder: Path, make: Callable[[], None]) -> Path:
    """Returns `folder`; if it does not exist, one process writes it with `make` while the others wait."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                make()
    return folder


def write_policy(folder: Path, model, tokenizer, record: dict) -> None:
    """Writes model, tokenizer and record: either all of them or none. Raises RunError if they cannot be written."""
    from safetensors import SafetensorError

    try:
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            (partial / MADE_FROM).write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error
