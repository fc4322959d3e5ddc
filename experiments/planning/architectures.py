"""Architectures of the policies that conf/model names, and their parameter counts by arithmetic, without torch.

The dimensions are in conf/architectures/*.json, under the names of transformers' config.json; a local folder has its
own config.json. memory.py and costs.py beside it count with them; tests/planning/test_plan.py compares the
counts with the models that transformers builds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.prefetch import cached_file
from otb.errors import RunError
from otb.policies.folders import base_of

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "architectures"
BIASES = {"qwen2": True, "mimo": True, "qwen3": False, "llama": False}  # of the query, key and value projections
HEAD_NORMS = {"qwen2": False, "mimo": False, "qwen3": True, "llama": False}  # a norm of each query and key head


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a dense decoder with grouped key-value heads and a gated MLP: Qwen2, Qwen3 or Llama.

    Args:
        model_type: transformers' name of the family, a key of BIASES.
        hidden: width of the residual stream.
        layers, heads, kv_heads, head_dim: of the attention.
        intermediate: width of the MLP.
        vocabulary: rows of the embedding.
        tied: whether the LM head is the embedding.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of each linear module of a layer."""
        return {
            "q_proj": (self.hidden, self.query_width),
            "k_proj": (self.hidden, self.key_width),
            "v_proj": (self.hidden, self.key_width),
            "o_proj": (self.query_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        """Returns the parameters of one layer: seven matrices, two norms, biases and head norms where it has them."""
        matrices = sum(inputs * outputs for inputs, outputs in self.linear_shapes.values())
        biases = (self.query_width + 2 * self.key_width) * BIASES[self.model_type]
        return matrices + 2 * self.hidden + biases + 2 * self.head_dim * HEAD_NORMS[self.model_type]

    @property
    def embedding_parameters(self) -> int:
        """Returns the parameters of the embedding, which are those of the LM head too."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Returns all parameters; tied embeddings count once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden  # the last is the final norm

    def lora_parameters(self, rank: int, targets: list[str] | None = None) -> int:
        """Returns the parameters of LoRA adapters: rank x (inputs + outputs) of each target in each layer.

        targets: names of linear modules; None for all of them, as model.lora.target_modules=all-linear.
        """
        shapes = self.linear_shapes
        known = [name for name in (targets or shapes) if name in shapes]
        return self.layers * sum(rank * sum(shapes[name]) for name in known)


def architecture_of(name: str, revision: str | None = None) -> Architecture:
    """Returns the architecture of `model.name`: of a folder's config.json, or by hub id of conf/architectures.

    A hub id that is not there is looked up in the cache of the hub, at `revision`. That of an adapter's folder is its
    base's. Raises RunError where none has it, or where the family is none that the formulas describe.
    """
    folder = Path(name).expanduser()
    if (base := base_of(folder)) is not None:
        return architecture_of(base.name, base.revision)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise RunError(f"model.name={name} has no config.json. Give a folder that save_pretrained wrote.")
        return _from_config(json.loads(file.read_text(encoding="utf8")), str(file))
    files = _files()
    file = files.get(name) or cached_file(name, "config.json", revision)
    if file is None:
        raise RunError(
            f"model.name={name} has no architecture in conf/architectures, and no config.json in the cache. Add a copy "
            f'of its config.json to the former, with "models": ["{name}"] in it, or run: '
            f"python experiments/prefetch.py --model {name}" + (f" --revision {revision}" if revision else "")
        )
    return _from_config(json.loads(file.read_text(encoding="utf8")), file.name if name in files else name)


@cache
def _files() -> dict[str, Path]:
    """Returns the file of each model that conf/architectures describes."""
    files = sorted(FOLDER.glob("*.json"))
    return {model: file for file in files for model in json.loads(file.read_text(encoding="utf8"))["models"]}


def _from_config(config: dict, source: str) -> Architecture:
    if config.get("model_type") not in BIASES:
        raise RunError(
            f"{source} describes model_type={config.get('model_type')}; memory and time are known for "
            f"{', '.join(BIASES)}. Use one of these for the plan."
        )
    heads = config["num_attention_heads"]
    return Architecture(
        model_type=config["model_type"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
    )
