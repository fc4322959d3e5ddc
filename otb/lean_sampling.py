"""Samples with transformers' generate in stages, so that rollouts which have ended cost nothing more.

generate goes on with every row of its batch until the last one ends: where the longest response has 64 tokens and the
mean one 25, most rows of most forwards are of no use. Here it stops once a third of them have ended and goes on with
the others and their cache. Prompts that stand next to each other and are equal, as those of a group are, are read once.
The distribution is that of one generate; the random numbers are drawn in another order. Every stage is a call of its
own, so that models and options which would notice are left to one call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ENDED_SHARE = 1 / 3  # of the rows of a stage, after which the next one begins
FEWEST = 8  # rows that must have ended: a stage costs as much as two tokens of a small model
SHARED_TOKENS = 2048  # of prompts that would be read again; below it, reading them once costs more than it saves
# Options that see a row's tokens or their number, or nothing of the sort: the same in one call and in several.
SAME_IN_STAGES = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "min_length", "max_length", "max_new_tokens"),
        *("suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "renormalize_logits"),
        *("remove_invalid_values", "disable_compile", "transformers_version", "_from_model_config"),
    }
)
# What an option is where it does nothing. 1 is neutral for factors and counts of what is otherwise one.
NEUTRAL: tuple = (None, False, 0, [], {})
FACTORS = frozenset({"num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"})


@contextmanager
def sampling_in_stages(model: Any) -> Iterator[None]:
    """Makes `model.generate` sample in stages inside, where the model and its options allow it."""
    before = vars(model).get("generate")
    model.generate = partial(generate_in_stages, model, model.generate)
    try:
        yield
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


def generate_in_stages(
    model: Any,
    generate: Callable,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation_config: GenerationConfig,
    **options,
) -> Tensor:
    """Samples a response to each row of input_ids (B, L), whose padding is on the left. -> ids (B, L + longest).

    generate: that of the model. What cannot be cut into stages goes to it as it is.
    """
    if options or not same_in_stages(generation_config, model.generation_config) or not can_be_cut(model):
        return generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **options
        )
    config = copy.copy(generation_config)
    config.return_dict_in_generate = True
    ends = torch.tensor(generation_config.eos_token_id, device=input_ids.device).reshape(-1)
    width = input_ids.size(1)
    sampled = input_ids.new_full((len(input_ids), width + config.max_new_tokens), config.pad_token_id)
    rows, ids, mask = torch.arange(len(input_ids), device=input_ids.device), input_ids, attention_mask
    cache = read_once(generate, config, ids, mask)
    while True:
        config.max_new_tokens = width + generation_config.max_new_tokens - ids.size(1)
        enough = EnoughEnded(ends, max(FEWEST, int(len(rows) * ENDED_SHARE)))
        result = generate(
            input_ids=ids, attention_mask=mask, generation_config=config, past_key_values=cache,
            stopping_criteria=[enough],
        )  # fmt: skip
        new, cache = result.sequences, result.past_key_values
        longest = new.size(1)
        sampled[rows, :longest] = new
        kept = (~torch.isin(new[:, ids.size(1) :], ends).any(1)).nonzero().squeeze(1)
        if longest == sampled.size(1) or not len(kept):
            return sampled[:, :longest]
        cache.batch_select_indices(kept)
        ids, rows = new[kept], rows[kept]
        mask = torch.cat([mask[kept], mask.new_ones(len(kept), longest - mask.size(1))], dim=1)


def same_in_stages(config: GenerationConfig, of_model: GenerationConfig) -> bool:
    """Tells whether several calls of generate do what one does, as far as options say.

    of_model: the model's own configuration, from which generate fills in what `config` leaves open.
    """
    merged = copy.deepcopy(config)
    merged.update(**of_model.to_dict(), defaults_only=True)
    changed = merged.to_diff_dict()
    counts_calls = {
        name
        for name, value in changed.items()
        if name not in SAME_IN_STAGES and value not in NEUTRAL and not (name in FACTORS and value == 1)
    }
    ends = config.eos_token_id is not None and config.max_new_tokens is not None
    return ends and merged.use_cache is not False and not counts_calls - {"use_cache"}


def can_be_cut(model: Any) -> bool:
    """Tells whether rows can be taken out of the model's cache, and nothing else in it remembers the batch."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False  # its cache is longer than the ids
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.is_encoder_decoder or any(hasattr(module, "rope_deltas") for module in base.modules()):
        return False
    if not base._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=base.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def read_once(generate: Callable, config: GenerationConfig, ids: Tensor, mask: Tensor) -> Any:
    """Returns a cache of all but the last token of each prompt, made of the different ones alone.

    It returns None unless every prompt stands as often as every other, next to its copies, and enough is saved.
    generate is made to sample one token, which is dropped: it alone knows how the model wants its positions.
    """
    different, counts = torch.unique_consecutive(torch.cat([ids, mask], dim=1), dim=0, return_counts=True)
    saved = (len(ids) - len(different)) * ids.size(1)
    if saved < SHARED_TOKENS or ids.size(1) < 2 or not counts.eq(counts[0]).all() or not mask[:, :-1].any(1).all():
        return None
    one_token = copy.copy(config)
    one_token.max_new_tokens = 1
    ids, mask = different[:, : ids.size(1)], different[:, ids.size(1) :]
    read = generate(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], generation_config=one_token)
    read.past_key_values.batch_repeat_interleave(int(counts[0]))
    return read.past_key_values


class EnoughEnded(StoppingCriteria):
    """Stops all rows once `enough` of them have sampled one of the tokens `ends`."""

    def __init__(self, ends: Tensor, enough: int):
        self.ends, self.enough = ends, enough
        self._ended: Tensor | bool = False

    def __call__(self, input_ids: Tensor, scores: Any, **_) -> Tensor:
        self._ended = self._ended | torch.isin(input_ids[:, -1], self.ends)
        return (self._ended.sum() >= self.enough).expand(len(input_ids))
