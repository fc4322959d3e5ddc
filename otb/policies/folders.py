"""Folders of weights that are made here: ordinary folders of transformers, with a record of what they were made from.

Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from otb.errors import unwritable
from otb.files import whole_folder

MADE_FROM = "made_from.json"  # the record


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
