"""MiMo-7B (arXiv 2505.07608): Qwen2 with a multi-token-prediction head, for which transformers has no class.

After this file is imported, transformers loads MiMo as Qwen2, without code from the hub, and silently drops the head's
weights; `shipped_head` reads them separately. The names and the order of the head's parts follow vLLM's
mimo_mtp.py. The head reads the states before the policy's final norm, as vLLM's mimo.py shows: it applies that norm
only before the LM head.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import cached_file

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "model.mtp_layers.0."  # the head that predicts the token after the next one; further heads are not read
PARTS = {  # part of the head -> part of otb.methods.mtp.MTPHead; all other parts belong to its layer
    "token_layernorm": "embedding_norm",
    "hidden_layernorm": "state_norm",
    "input_proj": "projection",
    "final_layernorm": "block.norm",
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class MiMoConfig(Qwen2Config):
    """The configuration of MiMo: Qwen2's, plus the number of heads."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """A Qwen2 model that ignores the weights of the heads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = (r"model\.mtp_layers\.",)


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)


def files_of_head(place: str, revision: str | None = None) -> list[str]:
    """Returns the safetensors files with the weights of a model's head in MiMo's layout.

    place: a folder or hub id, whose files are downloaded. Raises ValueError if there is no such head.
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
            f"weights=shipped needs weights named {HEAD}... in safetensors files, such as XiaomiMiMo/MiMo-7B-RL has; "
            f"{place} has none. Use weights=fresh, with warmup= to train the head first."
        )
    return files


def shipped_head(place: str, revision: str | None = None) -> dict[str, Tensor]:
    """Returns the weights of a model's head under the names of otb.methods.mtp.MTPHead, on the CPU in the file's dtype.

    place, revision: as in `files_of_head`. Raises ValueError if there is no head.
    """
    found: dict[str, Tensor] = {}
    for file in files_of_head(place, revision):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118, it is not a dictionary
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
    """Returns the path of a model's file, None if the model has no such file."""
    try:
        return cached_file(place, name, revision=revision)
    except OSError:
        return None
