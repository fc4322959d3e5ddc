"""Time and peak memory of the score norms in the LM head alone, against its plain matmul and against whole logits.

    python benchmarks/lm_head.py --hidden 3584 --vocabulary 152064 --tokens 8192 16384 32768 65536

A model without layers is TRL's fused head and nothing else. Memory is what a call adds at its peak: on a GPU by the
allocator, on a CPU by the resident set, where small numbers drown in what the allocator keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what is resident is in use

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks.memory_model import resident
from otb.score_norms import log_sum_squared_probs

GPU = torch.cuda.is_available()
WARM_UP = 1
TILE = 8192  # positions of the plain matmul at a time


def head(hidden: int, vocabulary: int, outputs: tuple[str, ...]) -> Qwen3ForCausalLM:
    """Returns an LM head behind an embedding, with TRL's fused forward for these outputs."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to("cuda" if GPU else "cpu", torch.bfloat16 if GPU else torch.float32)
    add_fused_lm_head(model, outputs=outputs)
    return model.eval()


def matmul(model: Qwen3ForCausalLM, ids: torch.Tensor) -> None:
    """Multiplies hidden states and LM head, tile by tile, and throws the logits away."""
    for states in model.model(input_ids=ids).last_hidden_state[0].split(TILE):
        torch.nn.functional.linear(states, model.lm_head.weight)


def whole_logits(model: Qwen3ForCausalLM, ids: torch.Tensor) -> None:
    """Makes all logits in float32, and from them what the fused head returns."""
    logits = model(input_ids=ids).logits.float()
    logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1))
    log_sum_squared_probs(logits)


def fused(model: Qwen3ForCausalLM, ids: torch.Tensor) -> None:
    """Asks TRL's fused head."""
    model(input_ids=ids, labels=ids, fused_lm_head=True)


def measured(call: Callable[[], None], repeats: int) -> dict[str, float]:
    """Returns median seconds of a call and the bytes that it adds at its peak."""
    seconds = []
    for repeat in range(WARM_UP + repeats):
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS from here on
            before = resident("VmRSS")
        started = time.perf_counter()
        call()
        if GPU:
            torch.cuda.synchronize()
        if repeat >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if GPU else resident("VmHWM")
    return {"seconds": statistics.median(seconds), "peak_bytes": peak - before}


CALLS = {  # name -> outputs of the fused head, what is called
    "matmul": (("log_probs",), matmul),
    "fused, log-probs": (("log_probs",), fused),
    "fused, log-probs and score norms": (("log_probs", "log_sum_sq_probs"), fused),
    "whole logits": (("log_probs",), whole_logits),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--repeats", type=int, default=5, help="counted calls")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.calls:
        outputs, call = CALLS[name]
        model = head(arguments.hidden, arguments.vocabulary, outputs)
        for tokens in arguments.tokens:
            ids = torch.randint(0, arguments.vocabulary, (1, tokens), device=model.device)
            row = {"call": name, "tokens": tokens}
            try:
                row |= measured(lambda model=model, ids=ids, call=call: call(model, ids), arguments.repeats)
                found = f"{row['seconds'] * 1e3:10.1f} ms {row['peak_bytes'] / 1e9:8.3f} GB"
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
                found = "out of memory"
            print(f"{name:<34} {tokens:>6} tokens {found}", flush=True)
            rows.append(row)
        del model
        if GPU:
            torch.cuda.empty_cache()
    if arguments.json:
        facts = {"device": torch.cuda.get_device_name() if GPU else "cpu", **vars(arguments)}
        Path(arguments.json).write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
