"""Times two loops of this project beside what transformers offers: `python benchmarks/alternatives.py`, two minutes.

Sampling: otb/training/lean_sampling.py beside generate as it is, with a static cache, with a static cache and
torch.compile, and beside continuous batching. Loss: the chunks of otb.lean_loss.py beside packed sequences without
padding, all rollouts in one or a few in each, whose sums of log-probs have to be the same. Seconds of the processor, on
the tiny policy and `arithmetic`, 16 prompts x 4; every way in turn on the same prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from otb.policies.tiny_warm_start import WarmStart, warm_start
from otb.tasks.arithmetic import Arithmetic
from otb.training.lean_loss import chunks
from otb.training.lean_sampling import lean_sampling
from otb.training.options import CHUNKS

PROMPTS, GROUP_SIZE = 16, 4
WARM_UP = 3  # batches that are not counted
PACKED = (64, 16, 8, 4)  # rollouts in a sequence


class Prompts(NamedTuple):
    """Prompts of a batch (B, L), padded on the left, and their mask."""

    ids: Tensor
    mask: Tensor


class Rollouts(NamedTuple):
    """Prompts and responses (B, L + T), their mask, the width L of the prompts, and lengths (B,) of the responses."""

    ids: Tensor
    mask: Tensor
    prompt_width: int
    lengths: Tensor


def batch(number: int, tokenizer: Any) -> Prompts:
    """Returns the prompts of a step, each GROUP_SIZE times."""
    rows = Arithmetic().train_dataset()
    texts = [
        tokenizer.apply_chat_template(rows[i % len(rows)]["prompt"], add_generation_prompt=True, tokenize=False)
        for i in range(number * PROMPTS, (number + 1) * PROMPTS)
        for _ in range(GROUP_SIZE)
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return Prompts(encoded["input_ids"], encoded["attention_mask"])


# ---- sampling


def ways_to_sample(load: Callable, options: dict) -> dict[str, Callable[[Prompts], Any]]:
    """Returns the ways by name, each with a model of its own, which some of them change."""

    def by_generate(model: Any, **more) -> Callable:
        config = GenerationConfig(**(options | more))
        return lambda prompts: model.generate(
            input_ids=prompts.ids, attention_mask=prompts.mask, generation_config=config
        )

    ours, continuous = load(), load()
    # Its own choice is a cache as large as the free memory, made anew at each call, which takes 17 s.
    small_cache = ContinuousBatchingConfig(num_blocks=64, page_size=128, max_batch_tokens=2048)

    def own_loop(prompts: Prompts) -> Tensor:
        with lean_sampling(ours):
            return by_generate(ours)(prompts)

    def continuous_batching(prompts: Prompts) -> Any:
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
        return continuous.generate_batch(
            rows, generation_config=GenerationConfig(**options), continuous_batching_config=small_cache
        )

    on_a_cpu_too = CompileConfig(fullgraph=False, mode="default")
    on_a_cpu_too._compile_all_devices = True  # transformers has no public name for it
    static = {"cache_implementation": "static"}
    return {
        "own loop": own_loop,
        "generate": by_generate(load()),
        "generate, static cache": by_generate(load(), **static, disable_compile=True),
        "generate, static cache, compiled": by_generate(load(), **static, compile_config=on_a_cpu_too),
        "continuous batching": continuous_batching,
    }


# ---- the loss


def by_length(rollouts: Rollouts) -> Iterator[tuple[Tensor, int]]:
    """Yields the rows of each chunk that a lean step would cut, and the width of its longest response."""
    all_rows = torch.ones_like(rollouts.lengths, dtype=torch.bool)
    for rows, _ in chunks(rollouts.lengths, all_rows, all_rows, -(-len(all_rows) // CHUNKS)):
        yield rows, int(rollouts.lengths[rows].max())


def in_chunks(model: Any, rollouts: Rollouts) -> Tensor:
    """Returns the sum of the log-probs of all responses as a lean step makes it: chunks by length, each padded."""
    total = torch.zeros(())
    for rows, width in by_length(rollouts):
        wide = slice(rollouts.prompt_width + width)
        ids, mask = rollouts.ids[rows, wide], rollouts.mask[rows, wide]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, -width:, None]).squeeze(-1)
        total = total + (log_probs * mask[:, -width:]).sum()
    return total


def packed(model: Any, rollouts: Rollouts, *, in_each: int) -> Tensor:
    """Returns the same sum from sequences without padding, each of `in_each` rollouts of similar length."""
    total = torch.zeros(())
    prompt_lengths = rollouts.mask[:, : rollouts.prompt_width].sum(1)
    for rows in rollouts.lengths.argsort().split(in_each):
        sequences = [rollouts.ids[row, rollouts.mask[row].bool()] for row in rows.tolist()]
        ids = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]  # tells where each begins
        own = positions[0] >= prompt_lengths[rows].repeat_interleave(torch.tensor([len(part) for part in sequences]))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        total = total + (log_probs * own[1:]).sum()
    return total


def sampled(model: Any, prompts: Prompts, options: dict) -> Rollouts:
    """Samples the rollouts whose loss is timed."""
    width = prompts.ids.size(1)
    with torch.no_grad(), lean_sampling(model):
        config = GenerationConfig(**options)
        ids = model.generate(input_ids=prompts.ids, attention_mask=prompts.mask, generation_config=config)
    ends = ids[:, width:].eq(options["eos_token_id"])
    lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, ids.size(1) - width)
    mask = torch.cat([prompts.mask, (torch.arange(ids.size(1) - width) < lengths[:, None]).long()], dim=1)
    return Rollouts(ids, mask, width, lengths)


# ---- side by side


class Times(NamedTuple):
    """Seconds of one call: of the processor, and on the clock, which counts compilers in processes of their own."""

    processor: float
    clock: float


def timed(call: Callable, *args: Any) -> tuple[Times, Any]:
    """Returns what a call takes, and its result."""
    started = (time.process_time(), time.perf_counter())
    result = call(*args)
    return Times(time.process_time() - started[0], time.perf_counter() - started[1]), result


def step_of(loss: Callable, model: Any, rollouts: Rollouts) -> float:
    """Makes a forward and a backward, and returns the sum."""
    model.zero_grad()
    total = loss(model, rollouts)
    total.backward()
    return total.item()


def padding(rollouts: Rollouts) -> tuple[float, float]:
    """Returns the share of positions that are padding: of the chunks, and of one batch as wide as its longest row."""
    computed = sum(len(rows) * (rollouts.prompt_width + width) for rows, width in by_length(rollouts))
    tokens = int(rollouts.mask.sum())
    return 1 - tokens / computed, 1 - tokens / rollouts.mask.numel()


def show(times: dict[str, list[Times]]) -> None:
    """Prints the median of every way beside that of the first one, which is ours."""
    ours = statistics.median(taken.processor for taken in next(iter(times.values()))[WARM_UP:])
    for name, of_way in times.items():
        median = statistics.median(taken.processor for taken in of_way[WARM_UP:])
        print(f"{name}: {median:.3f} s, {median / ours:.2f} of ours; the first {of_way[0].clock:.1f} s on the clock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=23, help=f"the first {WARM_UP} of them are not counted")
    batches = parser.parse_args().batches
    if batches <= WARM_UP:
        parser.error(f"--batches {batches}: the first {WARM_UP} are not counted; use {WARM_UP + 1} or more")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = str(warm_start(Arithmetic(), WarmStart()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {
        "do_sample": True, "top_k": 0, "max_new_tokens": Arithmetic().max_completion_length,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    model, ways = load(), ways_to_sample(load, options)
    losses = {"chunks": in_chunks} | {f"packed, {rows} in each": partial(packed, in_each=rows) for rows in PACKED}
    sampling: dict[str, list[Times]] = {name: [] for name in ways}
    learning: dict[str, list[Times]] = {name: [] for name in losses}
    padded = []
    for number in range(batches):
        prompts = batch(number, tokenizer)
        for name, way in ways.items():
            torch.manual_seed(number)
            sampling[name].append(timed(way, prompts)[0])
        rollouts, sums = sampled(model, prompts, options), []
        for name, loss in losses.items():
            times, total = timed(step_of, loss, model, rollouts)
            learning[name].append(times)
            sums.append(total)
        if max(sums) - min(sums) > 1e-5 * abs(sums[0]):
            sys.exit(f"the ways to make the loss disagree: {sums}")
        padded.append(padding(rollouts))
    show(sampling)
    show(learning)
    of_chunks, of_batch = (statistics.mean(shares) for shares in zip(*padded, strict=True))
    print(f"padding: {of_chunks:.2f} of the positions of the chunks, {of_batch:.2f} of a plain batch")


if __name__ == "__main__":
    main()
