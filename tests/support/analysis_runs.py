"""Writes synthetic run directories with known answers, and names the real ones, for the tests of analysis/."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

REAL_RUNS = Path(__file__).parents[1] / "data" / "runs"
TOKENS_PER_ROLLOUT = 25
PROMPTS = 16


def write_run(
    folder: Path,
    baseline: str = "otb",
    group_size: int = 4,
    seed: int = 0,
    *,
    steps: int = 40,
    rate: float = 0.02,
    start: float = 0.4,
    collapse_at: int | None = None,
    every: int = 10,
    state: str = "finished",
    noise: float = 0.0,
    changes: dict | None = None,
    environment: dict | None = None,
    measures: Callable[[int], dict] = lambda step: {},
    **facts,
) -> Path:
    """Writes a run whose accuracy is start + rate * step, at most 0.9, and 0.02 from collapse_at on.

    noise: none by default. measures(step): further metrics of a step.
    Own tokens per step: PROMPTS * group_size * TOKENS_PER_ROLLOUT. total_power is 0.2, half of it for otb.
    """
    path = folder / f"{baseline}-n{group_size}-seed{seed}"
    (path / "rollouts").mkdir(parents=True)
    config = {
        "baseline": {"_target_": f"otb.baselines.{baseline}.{baseline}", "_partial_": True},
        "task": {"_target_": "otb.tasks.arithmetic.Arithmetic", "train_prompts": 64},
        "model": {"name": "tiny", "lora": {}},
        "group_size": group_size,
        "seed": seed,
        "steps": steps,
        "learning_rate": 0.001,
        "runs_dir": str(folder),
    } | (changes or {})
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    versions = {"otb": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"}
    known = {"versions": versions, "commit": "a" * 40, "diff_sha256": None, "devices": ["cpu"]} | (environment or {})
    (path / "environment.json").write_text(json.dumps(known))
    (path / "status.json").write_text(json.dumps({"state": state, "step": steps, "steps": steps} | facts))
    rng, tokens = np.random.default_rng(seed), PROMPTS * group_size * TOKENS_PER_ROLLOUT

    def accuracy(step):
        if collapse_at is not None and step >= collapse_at:
            return 0.02
        return float(np.clip(start + rate * step + noise * rng.normal(), 0, 0.9))

    power = 0.1 if baseline == "otb" else 0.2
    rows = [
        step_row(step, accuracy(step), tokens, power, 0.1 + 0.05 * rng.random()) | measures(step)
        for step in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [
        {"step": step, "accuracy": accuracy(step), "pass_at_k": 0.9, "own_tokens_total": tokens * step}
        for step in range(0, steps + 1, every)
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    group().to_parquet(path / "rollouts" / f"step-{steps:08d}.parquet")
    return path


def step_row(step: int, score: float, tokens: int, power: float, gradient_norm: float) -> dict:
    """Returns the metrics of a step with this number of own tokens and this accuracy."""
    row = {"step": step, "own_tokens": tokens, "own_tokens_total": tokens * step, "loss": 0.0}
    row |= {"reward_mean": score, "accuracy": score, "reward_spread": (score * (1 - score)) ** 0.5}
    row |= {"gradient_norm": gradient_norm, "response_length_mean": 25.0, "energy_mean": 1.0, "total_power": power}
    row |= {"seconds_sampling": 0.5, "seconds_scoring": 0.01, "seconds_advantages": 0.04, "seconds_loss": 0.45}
    return row | {"seconds_step": 1.0, "peak_memory_bytes": 2**29}


def group() -> pd.DataFrame:
    """Returns one prompt group of two rollouts, with a tool token in the second; W = cumulated w, A = R - B by hand.

    The second rollout's advantages are doubled, as token weights would do.
    """
    first = {"tokens": ["7", "+", "8"], "own": [True] * 3, "reward": 1.0, "energies": [0.5, 0.5, 1.0]}
    second = {"tokens": ["1", "5<script>", "!"], "own": [True, False, True], "reward": 0.0, "energies": [0.5, 1.5]}
    first |= {"advantages": [0.5, 0.75, 1.0], "baselines": [0.5, 0.25, 0.0]}
    second |= {"advantages": [-1.0, -0.5], "baselines": [0.5, 0.25]}
    shared = {"step": 40, "prompt": 0, "prompt_text": "7+8 = <b>?"}
    rows = enumerate([first, second])
    return pd.DataFrame([shared | {"rollout": i, "response_text": "".join(row["tokens"])} | row for i, row in rows])


def write_sweep(folder: Path, seeds: int = 3, sizes=(4, 32), **options) -> Path:
    """Writes runs of otb, grpo and rloo at every size and seed; OTB gains 1.5 times as fast as the others."""
    for baseline, rate in (("otb", 0.03), ("grpo", 0.02), ("rloo", 0.02)):
        for size in sizes:
            for seed in range(seeds):
                write_run(folder, baseline, size, seed, rate=rate + 0.0005 * seed, **options)
    return folder
