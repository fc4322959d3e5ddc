"""Replaces the decoding loop inside transformers' generate with one that spends nothing on rollouts that have ended.

generate's loop computes every row of the batch until the last row ends. If the longest response has 64 tokens and the
mean is 25, more than half of this work is wasted. This loop differs in three ways:

    ended rows      leave the batch and its cache
    equal prompts   in adjacent rows, as in a prompt group, are read once
    each token      costs one random number instead of one per vocabulary entry

The distribution is the same as generate's, but the random numbers differ. Models and options for which rows are not
independent use generate's own loop. `LeanSampling` is in OTBTrainer's list of methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from otb.methods import Method

ENDED_SHARE = 1 / 8  # share of ended rows at which they are removed: each removal copies the cache of the others
# Options whose effect on a row does not depend on the other rows of the batch.
ROW_BY_ROW = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("no_repeat_ngram_size", "min_length", "min_new_tokens", "max_length", "max_new_tokens"),
        *("suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "renormalize_logits"),
        *("remove_invalid_values", "disable_compile", "transformers_version", "_from_model_config"),
    }
)
# Values at which an option does nothing; for FACTORS, 1 does nothing either.
NEUTRAL: tuple = (None, False, 0, [], {})
FACTORS = frozenset(
    {"repetition_penalty", "num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"}
)


class LeanSampling(Method):
    """Samples a turn with the loop below, `rows_per_generation` rollouts at once. TRL handles vLLM and images."""

    def around_turn(self, make, prompt_ids, images=None, *args, **kwargs):
        trainer = self.trainer
        if trainer.use_vllm or images is not None:
            return make(prompt_ids, images, *args, **kwargs)
        at_once = getattr(trainer.args, "rows_per_generation", None) or len(prompt_ids)
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        is_lean = getattr(trainer.args, "lean_steps", False) and not is_sharded
        completion_ids: list = []
        with lean_sampling(trainer.accelerator.unwrap_model(trainer.model)) if is_lean else nullcontext():
            for first in range(0, len(prompt_ids), at_once):  # generate returns no log-probs
                completion_ids += make(prompt_ids[first : first + at_once], images, *args, **kwargs)[0]
        return completion_ids, None


@contextmanager
def lean_sampling(model: Any) -> Iterator[None]:
    """Makes `model.generate` use the loop below inside the block, if the model and the options allow it."""
    before = vars(model).get("generate")
    model.generate = partial(generate, model, model.generate)
    try:
        yield
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


def generate(
    model: Any,
    of_model: Callable,
    input_ids: Tensor,
    attention_mask: Tensor,
    generation_config: GenerationConfig,
    **options,
) -> Tensor:
    """Samples a response to each row of input_ids (B, L), padded on the left. -> ids (B, L + longest response).

    of_model: the model's own generate, which gets the call unchanged if the loop below cannot serve it.
    """
    given = dict(input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **options)
    if options or not row_by_row(generation_config, model.generation_config) or not can_lose_rows(model):
        return of_model(**given)
    return of_model(**given, custom_generate=sample)


def row_by_row(config: GenerationConfig, of_model: GenerationConfig) -> bool:
    """Tells whether the options let the loop below sample each row independently of the others.

    of_model: the model's own configuration, which supplies the values that `config` leaves open.
    """
    merged = copy.deepcopy(config)
    merged.update(**of_model.to_dict(), defaults_only=True)
    changed = merged.to_diff_dict()
    others = {
        name
        for name, value in changed.items()
        if name not in ROW_BY_ROW and value not in NEUTRAL and not (name in FACTORS and value == 1)
    }
    ends = None not in (config.eos_token_id, config.pad_token_id, config.max_new_tokens)
    return ends and merged.use_cache is not False and not others - {"use_cache"}


def can_lose_rows(model: Any) -> bool:
    """Tells whether rows can be removed from the model's cache, and the model keeps no other state of the batch."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False  # the cache is longer than the ids
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.is_encoder_decoder or any(hasattr(module, "rope_deltas") for module in base.modules()):
        return False
    if not base._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=base.config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Callable,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **inputs,
) -> Tensor:
    """Samples in place of generate's own loop, and generate calls it. -> ids (B, L + longest response).

    inputs: the model's arguments as generate has prepared them, including an empty cache.
    """
    pad = generation_config.pad_token_id
    whole = input_ids.new_full((len(input_ids), stopping_criteria.max_length), pad)
    whole[:, : input_ids.size(1)] = input_ids
    rows, ids = torch.arange(len(input_ids), device=input_ids.device), input_ids
    ended = torch.zeros_like(rows, dtype=torch.bool)
    cache = inputs["past_key_values"]
    copies = copies_of_each(ids, inputs.get("attention_mask"))
    different = of_rows(inputs, rows[::copies], len(rows))
    output = model(**model.prepare_inputs_for_generation(ids[::copies], is_first_iteration=True, **different))
    cache.batch_repeat_interleave(copies)
    logits = output.logits[:, -1].repeat_interleave(copies, 0)
    while True:
        tokens = chosen(logits_processor(ids, logits.float()), generation_config.do_sample)
        tokens = tokens.masked_fill(ended, pad)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        whole[rows, ids.size(1) - 1] = tokens
        ended = ended | stopping_criteria(ids, None)
        ended_count = int(ended.sum())
        if ended_count == len(rows):
            return whole[:, : ids.size(1)]
        inputs = model._update_model_kwargs_for_generation(output, inputs)
        if ended_count >= ENDED_SHARE * len(rows):
            kept = (~ended).nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, ids, ended, inputs = rows[kept], ids[kept], ended[kept], of_rows(inputs, kept, len(rows))
        output = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs))
        logits = output.logits[:, -1]


def of_rows(inputs: dict[str, Any], rows: Tensor, count: int) -> dict[str, Any]:
    """Returns the inputs of the given rows of a batch of `count` rows. Inputs without a row axis stay as they are."""
    each = {name for name, value in inputs.items() if isinstance(value, Tensor) and len(value) == count}
    return {name: value[rows] if name in each else value for name, value in inputs.items()}


def copies_of_each(ids: Tensor, mask: Tensor | None) -> int:
    """Returns how many times each prompt repeats in adjacent rows of ids (B, L); 1 if the counts differ."""
    prompts = ids if mask is None else torch.cat([ids, mask], dim=1)
    counts = torch.unique_consecutive(prompts, dim=0, return_counts=True)[1]
    return int(counts[0]) if counts.eq(counts[0]).all() else 1


def chosen(scores: Tensor, do_sample: bool) -> Tensor:
    """Returns one token per row of scores (B, V), drawn from their softmax or the most likely one. -> (B,)

    Drawing inverts the cumulative distribution: it takes the first token whose cumulative probability reaches a uniform
    number. This number is never 0, so a token of probability 0 is never drawn.
    """
    if not do_sample:
        return scores.argmax(-1)
    precise = torch.float32 if scores.device.type == "mps" else torch.float64  # float32 would round rare tokens away
    reached = scores.softmax(-1).cumsum(-1, dtype=precise)
    uniform = 1 - torch.rand(len(scores), 1, dtype=reached.dtype, device=scores.device)
    return torch.searchsorted(reached, uniform * reached[:, -1:]).squeeze(1)
