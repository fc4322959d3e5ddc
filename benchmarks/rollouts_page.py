"""Size and times of a page of rollouts: `python benchmarks/rollouts_page.py [GROUPS]`, a minute for 100 groups.

The groups have 32 rollouts of 1,000 tokens with OTB's numbers, words drawn by Zipf's law. It needs chromium and
chromium-driver.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.rollouts.__main__ import main as write_page
from tests.support.browser import Browser, chromium

GROUPS_PER_STEP, ROLLOUTS, TOKENS = 20, 32, 1000
SCROLL = """const done = arguments[0], frames = [], end = document.documentElement.scrollHeight;
let y = 0, last = performance.now();
function frame() {
  const now = performance.now();
  frames.push(now - last);
  last = now;
  scrollTo(0, y += 120);
  y < end ? requestAnimationFrame(frame) : done(frames.sort((a, b) => a - b));
}
requestAnimationFrame(frame);"""


def group(rng: np.random.Generator, words: np.ndarray, step: int, prompt: int) -> list[dict]:
    """Returns the rows of one prompt group, as experiments/running/run_trainer.py writes them."""
    rewards = (rng.random(ROLLOUTS) < 0.5).astype(float)
    sure = rng.random((ROLLOUTS, TOKENS)) < 0.6
    log_probs = -rng.exponential(np.where(sure, 0.01, 1.2)).astype(np.float32)
    miss = 1 - np.exp(log_probs)
    energies = (miss**2 + 0.1 * rng.random(miss.shape) * miss).cumsum(1, dtype=np.float32)
    baseline = (energies * rewards[:, None]).sum(0) / energies.sum(0)
    rows = []
    for i, reward in enumerate(rewards):
        row = {
            "step": step,
            "prompt": prompt,
            "rollout": i,
            "prompt_text": f"problem {step}-{prompt}",
            "reward": reward,
        }
        row |= {"tokens": words[rng.zipf(1.3, TOKENS) % len(words)], "own": [True] * TOKENS, "ending": "end"}
        row |= {"advantages": reward - baseline, "baselines": baseline}
        rows.append(row | {"energies": energies[i], "log_probs": log_probs[i]})
    return rows


def write_run(run: Path, groups: int) -> None:
    rng = np.random.default_rng(0)
    words = np.array([f" {rng.integers(26**4):x}" + chr(97 + i % 26) for i in range(30_000)], object)
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    for start in range(0, groups, GROUPS_PER_STEP):
        step, count = 1 + start // GROUPS_PER_STEP, min(GROUPS_PER_STEP, groups - start)
        rows = [row for prompt in range(count) for row in group(rng, words, step, prompt)]
        pd.DataFrame(rows).to_parquet(run / "rollouts" / f"step-{step:08d}.parquet")


def seconds_to_open(browser: Browser, page: Path) -> float:
    """Returns the time until tokens are there."""
    started = time.perf_counter()
    browser.open(page)
    browser.wait("return document.querySelector('.t') !== null")
    return time.perf_counter() - started


def main() -> None:
    groups = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, groups)
        started = time.perf_counter()
        write_page([str(run)])
        print(f"written in {time.perf_counter() - started:.1f} s")
        with chromium(Path(folder) / "profile") as browser:
            times = [seconds_to_open(browser, run / "rollouts.html") for _ in range(4)]
            print(f"opens in {times[0]:.2f} s, then {', '.join(f'{time:.2f}' for time in times[1:])} s")
            frames = browser.window.execute_async_script(SCROLL)
            late = frames[int(0.95 * len(frames))]
            print(f"scrolling a group: frames of {frames[len(frames) // 2]:.0f} ms (median), {late:.0f} ms (95 %)")


if __name__ == "__main__":
    main()
