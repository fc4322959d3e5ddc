"""Warm-starts the tiny policy with supervised steps on a task's noisy demonstrations, and caches it per recipe.

experiments/, the variance laboratory and tests call `warm_start` for `model=tiny`. RL seeds affect only RL: all runs of
a task start from the same policy unless `WarmStart.seed` differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tokenizers
import torch
import transformers

from otb.files import whole_folder
from otb.policies.folders import made_once
from otb.policies.tiny_policy import build_model, build_tokenizer, model_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

RECIPE_VERSION = 1  # increase it when a change of this file changes the weights of a recipe
DIGESTED_DEMONSTRATIONS = 512
NOT_IN_LOSS = -100
WARMUP_STEPS = 20
MAX_GRAD_NORM = 1.0


class DemonstratedTask(Protocol):
    """A task whose demonstrations can warm-start the tiny policy."""

    name: str

    def demonstrations(self, seed: int, n: int, noise: float) -> list[list[dict]]:
        """Returns `n` chats for the template; a larger `n` appends more.

        noise: 0 = careful and right, 1 = as unreliable as the warm-started policy should be.
        """


@dataclass(frozen=True)
class WarmStart:
    """A recipe of `steps` AdamW steps on `batch` fresh demonstrations each; linear warm-up, then cosine decay to 0.

    The first `careful_steps` use demonstrations with little noise, from which the policy learns arithmetic three times
    as fast. The others use the full noise, which leaves the policy unsure and gives RL something to improve.
    """

    steps: int = 620
    careful_steps: int = 450
    careful_noise: float = 0.1
    noise: float = 1.0
    batch: int = 32
    learning_rate: float = 4e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "learning_rate"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key}={getattr(self, key)} must be positive. Try the default of WarmStart.")
        if not 0 <= self.careful_steps <= self.steps:
            raise ValueError(f"careful_steps={self.careful_steps} must be 0 to steps={self.steps}. Try steps // 2.")


def default_cache_dir() -> Path:
    """Returns `$OTB_CACHE`, or `~/.cache/otb` if it is not set."""
    return Path(os.environ.get("OTB_CACHE") or Path.home() / ".cache" / "otb")


def warm_start(
    task: DemonstratedTask,
    recipe: WarmStart,
    cache_dir: Path | str | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Path:
    """Returns the folder of the warm-started policy and its tokenizer, in the transformers format.

    It is trained unless the cache has it. progress(step, steps, loss) is called after each training step, loss in nats
    per token. If several processes call at once, one trains and the others wait. A killed call leaves nothing that a
    later call could mistake for a policy. Training uses one thread, so the number of cores does not affect the weights.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache / f"{task.name}-{recipe_key(task, recipe)}"

    def make() -> None:
        tokenizer = build_tokenizer()
        with _one_thread():
            model = train(build_model(tokenizer, recipe.seed), tokenizer, task, recipe, progress)
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            record = {"task": task.name, **asdict(recipe)}
            (partial / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")

    return made_once(folder, make)


def recipe_key(task: DemonstratedTask, recipe: WarmStart) -> str:
    """Returns 16 hexadecimal digits, a hash of everything that determines the weights.

    For the task it hashes demonstrations, not parameters: a change of their generator gives another policy, a change of
    `train_prompts` does not.
    """
    tokenizer = build_tokenizer()
    ingredients = {
        "version": RECIPE_VERSION,
        "recipe": asdict(recipe),
        "demonstrations": [
            task.demonstrations(recipe.seed, DIGESTED_DEMONSTRATIONS, noise)
            for noise in (recipe.careful_noise, recipe.noise)
        ],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "chat_template": tokenizer.chat_template,
        "response_template": tokenizer.response_template,
        "model": model_config(tokenizer).to_dict(),
        "libraries": [torch.__version__, transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:16]


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: DemonstratedTask,
    recipe: WarmStart,
    progress: Callable[[int, int, float], None] | None = None,
) -> Qwen3ForCausalLM:
    """Trains `model` in place on the assistant's tokens of the demonstrations and returns it."""
    phases = ((recipe.careful_steps, recipe.careful_noise), (recipe.steps - recipe.careful_steps, recipe.noise))
    batches = []
    for steps, noise in phases:
        batches += _batches(task.demonstrations(recipe.seed, steps * recipe.batch, noise), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, recipe.steps)
    model.train()
    for step, chats in enumerate(batches, start=1):
        loss = model(**encode(chats, tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step, recipe.steps, loss.item())
    return model.eval()


def _batches(demonstrations: list, recipe: WarmStart) -> list[list]:
    """Returns batches in random order, each of chats with similar length: mixed lengths would be half padding."""
    draw, pool, batches = random.Random(recipe.seed), 16 * recipe.batch, []
    for start in range(0, len(demonstrations), pool):
        alike = sorted(demonstrations[start : start + pool], key=lambda chat: len(str(chat)))
        slices = [alike[at : at + recipe.batch] for at in range(0, len(alike), recipe.batch)]
        batches += draw.sample(slices, len(slices))
    return batches


def encode(chats: list[list[dict]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Returns input_ids, attention_mask and labels of B chats, (B, L) each, padded right.

    Only assistant tokens have labels.
    """
    rendered = tokenizer.apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    ids = [torch.tensor(row) for row in rendered["input_ids"]]
    labels = [
        row.masked_fill(~torch.tensor(by_assistant, dtype=torch.bool), NOT_IN_LOSS)
        for row, by_assistant in zip(ids, rendered["assistant_masks"], strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=NOT_IN_LOSS),
    }


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
