"""What the score norms cost on real shapes (claim C5): the no-grad pass against the loss's forward and backward.

    python benchmarks/proxy_pass.py --layers 28 --hidden 1024 --rollouts 16 --tokens 2048

The weights are random: time and memory depend on shapes alone. On a CPU use small numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

REPEATS, WARM_UP = 8, 2


def build(arguments, outputs: tuple[str, ...]) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu", dtype)
    add_fused_lm_head(model, outputs=outputs)
    if torch.cuda.is_available():
        model.gradient_checkpointing_enable()
    return model


def measure(call) -> tuple[float, float]:
    """Median seconds of a call and its peak memory in GiB (0 on a CPU)."""
    seconds = []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for repeat in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repeat >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return statistics.median(seconds), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("layers", 4), ("hidden", 256), ("vocabulary", 151_936), ("rollouts", 4), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rollouts-per-forward", type=int, default=8)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", **vars(arguments)}
    for name, outputs, backward in (
        ("log-probs pass, no grad", ("log_probs",), False),
        ("log-probs and score norms, no grad", ("log_probs", "log_sum_sq_probs"), False),
        ("loss, forward and backward", ("log_probs", "entropy"), True),
    ):
        model = build(arguments, outputs)
        model.train(backward)
        ids = torch.randint(0, arguments.vocabulary, (arguments.rollouts, arguments.tokens), device=model.device)

        def step(model=model, ids=ids, backward=backward):
            for chunk in ids.split(arguments.rollouts_per_forward):
                with torch.set_grad_enabled(backward):
                    result = model(input_ids=chunk, labels=chunk, fused_lm_head=True)
                if backward:
                    result.log_probs.sum().backward()

        seconds, peak = measure(step)
        figures[name] = {"seconds": seconds, "peak_gib": peak}
        print(f"{name:<36} {seconds * 1e3:9.1f} ms   peak {peak:6.2f} GiB", flush=True)
        del model, step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    plain, norms = (figures[name]["seconds"] for name in list(figures)[-3:-1])
    loss = figures["loss, forward and backward"]["seconds"]
    print(f"extra pass / loss: {norms / loss:.3f}   on top of a pass that TRL makes anyway: {norms / plain - 1:+.3f}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
