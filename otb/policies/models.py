"""Loads policies by name: `tiny` (built and warm-started here), a hub id or a local folder.

experiments/running/train.py calls in this order: `describe_policy` (tokenizer and configuration, which are small
files), the checks of prompts and LoRA targets, `policy_folder` (the warm start), `load_model` (the weights).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from otb.errors import NOT_CACHED, RunError, first_line, no_model, not_from_the_hub, unwritable
from otb.files import sha256_of
from otb.policies.folders import MADE_FROM, WEIGHT_FILES, Base, base_of
from otb.policies.gguf_files import unpacked
from otb.policies.merged_adapters import merged
from otb.policies.mimo import files_of_head
from otb.policies.templates import set_chat_template, stop_at_end_of_turn
from otb.policies.tiny_policy import build_tokenizer, model_config
from otb.policies.tiny_warm_start import WarmStart, default_cache_dir, warm_start

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny"


def describe_policy(
    name: str, revision: str | None, chat_template: str | None = None, gguf_file: str | None = None
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Returns tokenizer and configuration of a policy, without its weights.

    chat_template: `model.chat_template`, see templates.py; None keeps the tokenizer's own. The tokenizer's end token
    becomes the one that ends a turn in the template. gguf_file: a file in `name`, unpacked on first use; likewise, an
    adapter is merged with its base on first use. Raises RunError if they cannot be loaded, or if there is no chat
    template, because prompts are chat messages.
    """
    if name == TINY:
        tokenizer = build_tokenizer()
        return tokenizer, model_config(tokenizer)
    place = _place(name, revision, gguf_file)
    try:
        config = AutoConfig.from_pretrained(place, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(place, revision, error) from error
    except StrictDataclassError as error:  # the configuration contradicts itself; the error's first line is a heading
        raise _unreadable(place, revision, ValueError(str(error).rpartition("\n")[2].strip())) from error
    set_chat_template(tokenizer, chat_template, name)
    stop_at_end_of_turn(tokenizer)
    return tokenizer, config


def check_prompt_lengths(
    prompts: Iterable[list[dict]],
    tokenizer,
    config,
    max_prompt_length: int | None,
    max_completion_length: int,
    tools: list[Callable] | None = None,
) -> int:
    """Raises RunError if a prompt (chat messages) is longer than the limit, in tokens with the chat template.

    Returns an upper bound of the tokens of the longest prompt: its length in bytes, but at most the limit.

    max_prompt_length: None for the model's context minus `max_completion_length`; there is no limit if the
    configuration states no context. A token has at least one byte, so only texts with more bytes than the limit are
    tokenized. tools: the tools that the chat template describes in every prompt.
    """
    context = getattr(config, "max_position_embeddings", None)
    limit = max_prompt_length
    if context is not None:
        room = context - max_completion_length
        if room < 1:
            raise RunError(
                f"task.max_completion_length={max_completion_length} leaves no room for a prompt in the model's "
                f"context of {context} tokens. Try task.max_completion_length={context // 2}."
            )
        limit = room if limit is None else min(limit, room)
    longest, too_long, most_bytes = 0, [], 0
    for row, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        most_bytes = max(most_bytes, len(text.encode()))
        if limit is not None and len(text.encode()) > limit:
            length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            longest = max(longest, length)
            too_long += [row] if length > limit else []
    if too_long:
        source = "max_prompt_length" if limit == max_prompt_length else "the model's context minus a response's length"
        fix = f"Try max_prompt_length={longest}" if limit == max_prompt_length else "Lower task.max_completion_length"
        raise RunError(
            f"{len(too_long)} prompts are longer than {limit} tokens ({source}): the first is row {too_long[0]}, the "
            f"longest has {longest} tokens. {fix}, or leave these rows out of the dataset."
        )
    return most_bytes if limit is None else min(most_bytes, limit)


def check_lora_targets(lora: LoraConfig, config: PreTrainedConfig) -> None:
    """Raises RunError if a LoRA target names no module of the architecture, which is built without weights."""
    if lora.target_modules == "all-linear":
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else sorted(lora.target_modules)
    for target in targets:
        pattern = type(lora)(target_modules=target if isinstance(lora.target_modules, str) else [target])
        if not any(check_target_module_exists(pattern, name) for name in names):
            linear = sorted({name.rpartition(".")[2] for name in names})
            raise RunError(
                f"model.lora.target_modules={target} matches no linear module of the model; each target must match "
                f"one. Found: {', '.join(linear)}. Try model.lora.target_modules=all-linear."
            )


def check_shipped_head(name: str, revision: str | None) -> None:
    """Raises RunError if the model's files hold no weights of a multi-token-prediction head."""
    try:
        files_of_head(_place(name, revision, None), revision)
    except ValueError as error:
        raise RunError(f"auxiliary.{error}".replace("Use weights=", "Use auxiliary.weights=")) from error


def policy_folder(
    name: str,
    task,
    recipe: dict,
    progress: Callable[[int, int, float], None] | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
) -> str:
    """Returns the place of the policy's files: `name` itself, or a folder in the cache, which is made if necessary.

    The cache holds warm-started tiny policies, unpacked files (`gguf_file` in `name`) and merged adapters. recipe:
    fields of `WarmStart`. A task without demonstrations gets the tiny policy of `arithmetic`.
    """
    if name != TINY:
        return _place(name, revision, gguf_file)
    if not hasattr(task, "demonstrations"):
        from otb.tasks.arithmetic import Arithmetic

        task = Arithmetic()
    try:
        warm = WarmStart(**recipe)
    except (TypeError, ValueError) as error:
        raise RunError(f"model.warm_start: {error}") from error
    try:
        return str(warm_start(task, warm, progress=progress))
    except (OSError, SafetensorError) as error:
        raise unwritable(default_cache_dir(), error) from error


def load_model(
    folder: str, revision: str | None, dtype: str, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Loads the policy's weights. Raises RunError if they cannot be loaded.

    dtype: "float32" or "bfloat16". attn_implementation: "sdpa", "flash_attention_2" or another name in transformers;
    None for its default.
    """
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        return AutoModelForCausalLM.from_pretrained(folder, revision=revision, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, revision, error) from error


def model_facts(folder: str, revision: str | None) -> dict[str, str | dict | None]:
    """Returns the model's entries in environment.json: name and commit of a hub model, or hashes of a folder's weights.

    For a folder that was made here (unpacked, merged, warm-started) they include its origin. The commit is read from
    the cache, which `describe_policy` has filled.
    """
    if Path(folder).is_dir():
        files = sorted(file for pattern in WEIGHT_FILES for file in Path(folder).glob(pattern))
        facts = {"model": folder, "model_sha256": {file.name: sha256_of(file) for file in files}}
        record = Path(folder) / MADE_FROM
        return facts | ({"model_made_from": json.loads(record.read_text(encoding="utf8"))} if record.exists() else {})
    config = try_to_load_from_cache(folder, "config.json", revision=revision)  # .../snapshots/COMMIT/config.json
    return {"model": folder, "model_revision": Path(config).parent.name if isinstance(config, str) else revision}


def _place(name: str, revision: str | None, gguf_file: str | None) -> str:
    if gguf_file is not None:
        try:
            return str(unpacked(name, revision, gguf_file))
        except (OSError, ValueError) as error:
            raise RunError(
                f"model.gguf_file={gguf_file} of model.name={name} cannot be read: {first_line(error)}. It must be a "
                "GGUF file of an architecture that transformers can unpack (Llama, Qwen2, Qwen3, ...), in a folder or "
                "on the hub. With network access, run: python experiments/prefetch.py --model "
                f"{name} --gguf-file {gguf_file}"
            ) from error
    folder = Path(name).expanduser()
    if (base := base_of(folder)) is not None:
        return _merged(folder, base)
    return str(folder) if folder.is_dir() else name


def _merged(folder: Path, base: Base) -> str:
    place = _place(base.name, base.revision, None)
    try:
        AutoConfig.from_pretrained(place, revision=base.revision)  # shows whether it exists, and caches its commit
    except (OSError, ValueError, KeyError) as error:
        reason = str(_unreadable(place, base.revision, error)).replace("model.name=", "base_model_name_or_path=")
        raise RunError(f"model.name={folder} is an adapter, and its base must be there: {reason}") from error
    try:
        return str(merged(folder, place, base.revision, model_facts(place, base.revision)))
    except (OSError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise RunError(
            f"model.name={folder} is an adapter that cannot be merged into {place}: {reason}. Both must be the same as "
            "in training. Restore the folder, or correct base_model_name_or_path in its adapter_config.json."
        ) from error


def _unreadable(place: str, revision: str | None, error: Exception) -> RunError:
    if Path(place).is_dir():
        return no_model(place, first_line(error).rstrip("."))
    return not_from_the_hub(place, revision, NOT_CACHED if constants.HF_HUB_OFFLINE else first_line(error).rstrip("."))
