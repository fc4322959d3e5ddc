"""Samples with transformers' generate in stages, so that rollouts which have ended cost nothing more.

generate goes on with every row of its batch until the last one ends: where the longest response has 64 tokens and the
mean one 25, most rows of most forwards are of no use. Here it stops once a third of them have ended and goes on with
the others and their cache. Prompts that stand next to each other and are equal, as those of a group are, are read once.
The distribution is that of one generate; the random numbers are drawn in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

ENDED_SHARE = 1 / 3  # of the rows of a stage, after which the next one begins
FEWEST = 8  # rows that must have ended: a stage costs as much as two tokens of a small model
SHARED_TOKENS = 2048  # of prompts that would be read again; below it, reading them once costs more than it saves


@contextmanager
def sampling_in_stages(model: Any) -> Iterator[None]:
    """Makes `model.generate` sample in stages inside, where its options allow it."""
    model.generate = partial(generate_in_stages, model.generate)
    try:
        yield
    finally:
        del model.generate


def generate_in_stages(
    generate: Callable, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig, **options
) -> Tensor:
    """Samples a response to each row of input_ids (B, L), whose padding is on the left. -> ids (B, L + longest).

    generate: that of a transformers model. What cannot be cut into stages goes to it as it is.
    """
    if options or not ends_by_tokens_alone(generation_config):
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


def ends_by_tokens_alone(config: GenerationConfig) -> bool:
    """Tells whether a row ends by one of its end tokens or by its length, and a cache can be cut into rows."""
    return (
        config.eos_token_id is not None
        and config.max_new_tokens is not None
        and config.use_cache is not False  # None: the default, which is True
        and config.cache_implementation is None
        and not (config.stop_strings or config.max_time or config.return_dict_in_generate)
        and (config.num_beams or 1) == (config.num_return_sequences or 1) == 1
    )


def read_once(generate: Callable, config: GenerationConfig, ids: Tensor, mask: Tensor) -> Any:
    """Returns a cache of all but the last token of each prompt, made of the different ones; None where it is no gain.

    Equal prompts stand next to each other, equally many of each. generate is made to sample one token, which is
    dropped: it alone knows how the model wants its positions.
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
    """Stops all rows once `most` of them have sampled one of the tokens `ends`."""

    def __init__(self, ends: Tensor, most: int):
        self.ends, self.most = ends, most
        self._ended: Tensor | bool = False

    def __call__(self, input_ids: Tensor, scores: Any, **_) -> Tensor:
        self._ended = self._ended | torch.isin(input_ids[:, -1], self.ends)
        return (self._ended.sum() >= self.most).expand(len(input_ids))
