"""Writes folders of weights, and reads from that of an adapter what its base is.

Those that are made here are ordinary folders of transformers, with a record of what they were made from. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from otb.errors import RunError, first_line, unwritable
from otb.files import whole_folder

MADE_FROM = "made_from.json"  # the record
WEIGHT_FILES = ("*.safetensors", "*.bin")
ADAPTER = "adapter_config.json"  # peft's; a checkpoint of a run with LoRA holds it instead of a config.json


class Base(NamedTuple):
    """The weights that an adapter was trained on: a folder or hub id, and the revision of the latter."""

    name: str
    revision: str | None


def base_of(folder: Path) -> Base | None:
    """Returns the base that an adapter's folder names; None where the folder holds no adapter.

    Raises RunError where the adapter is none of LoRA, or where its base is a folder that is not there.
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
            "It must be what peft writes, with peft_type and base_model_name_or_path. Restore it."
        ) from error
    if kind != "LORA":
        raise RunError(
            f"model.name={folder} is an adapter of peft_type={kind}, and only one of LoRA is merged into its base. "
            "Merge it yourself, and give the folder that save_pretrained writes."
        )
    is_path = str(base.name).startswith(("/", "./", "../", "~")) or str(base.name).count("/") > 1
    if base.name is None or (is_path and not Path(base.name).expanduser().is_dir()):
        raise RunError(
            f"model.name={folder} is an adapter of base_model_name_or_path={base.name}, which is not a folder. An "
            f"adapter needs the weights that it was trained on. Restore them, or write where they are into {file}."
        )
    return base


def made_once(folder: Path, make: Callable[[], None]) -> Path:
    """Returns `folder`, written by `make` where it is not there: by one of the processes that ask, the others wait."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                make()
    return folder


def write_policy(folder: Path, model, tokenizer, record: dict) -> None:
    """Writes model, tokenizer and record, all of them or nothing. Raises RunError where they cannot be written."""
    from safetensors import SafetensorError

    try:
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            (partial / MADE_FROM).write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error
