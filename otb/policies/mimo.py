"""MiMo-7B (arXiv 2505.07608): Qwen2 with a multi-token-prediction head, for which transformers has no class.

Importing this file makes transformers load it without code from the hub, as Qwen2, which drops the head's weights
without a word; `shipped_head` reads them by hand. Names and order of the head's parts: vLLM's mimo_mtp.py; that it
reads the states before the policy's final norm: vLLM's mimo.py, which takes that norm only before the LM head.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import cached_file

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "model.mtp_layers.0."  # of the head that predicts the token after the next one; further ones are not read
PARTS = {  # of the head -> of otb.methods.mtp.MTPHead; all others are those of its layer
    "token_layernorm": "embedding_norm",
    "hidden_layernorm": "state_norm",
    "input_proj": "projection",
    "final_layernorm": "block.norm",
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class MiMoConfig(Qwen2Config):
    """Describes MiMo: what Qwen2's configuration has, and the number of heads."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Computes what Qwen2 does. Weights of heads are left in the file."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\.",)


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


def files_of_head(place: str, revision: str | None = None) -> list[str]:
    """Returns the files that hold the weights of a model's head, in safetensors and MiMo's layout.

    place: a folder or hub id; what the hub has is downloaded. Raises ValueError where there is no such head.
    """
    if (index := _file(place, INDEX, revision)) is not None:
        with open(index, encoding="utf8") as opened:
            named = json.load(opened)["weight_map"]
        names = sorted({named[key] for key in named if key.startswith(HEAD)})
    else:
        names = [SINGLE]
    files = [file for name in names if (file := _file(place, name, revision)) is not None and _holds_head(file)]
    if not files:
        raise ValueError(
            f"weights=shipped: {place} has no weights named {HEAD}..., as XiaomiMiMo/MiMo-7B-RL has in its safetensors "
            "files. Use weights=fresh, and warmup= for the head to learn."
        )
    return files


def shipped_head(place: str, revision: str | None = None) -> dict[str, Tensor]:
    """Returns the weights of a model's head by the names of otb.methods.mtp.MTPHead, read on the CPU in their own type.

    place, revision: as in `files_of_head`. Raises ValueError where there is none.
    """
    found: dict[str, Tensor] = {}
    for file in files_of_head(place, revision):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118, it is no dictionary
                if key.startswith(HEAD):
                    found[name_in_head(key.removeprefix(HEAD))] = weights.get_tensor(key)
    return found


def name_in_head(key: str) -> str:
    """Returns the name that a weight of MiMo's head has in MTPHead: input_proj.weight -> projection.weight."""
    part, _, rest = key.partition(".")
    return f"{PARTS[part]}.{rest}" if part in PARTS else f"block.layers.0.{key}"


def _holds_head(file: str) -> bool:
    with safe_open(file, "pt") as weights:
        return any(key.startswith(HEAD) for key in weights.keys())  # noqa: SIM118


def _file(place: str, name: str, revision: str | None) -> str | None:
    """Returns where a file of a model is, None where it has no such file."""
    try:
        return cached_file(place, name, revision=revision)
    except OSError:
        return None
