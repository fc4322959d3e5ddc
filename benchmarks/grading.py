"""Time of grading: `python benchmarks/grading.py`, under a minute.

A step of 512 responses whose plain answers need no math-verify, hostile text that must not take longer than its length,
and answers that math-verify compares.
"""

from __future__ import annotations

import statistics
import time

from otb.tasks.grading import Outcome, grade, grade_batch

REPEATS = 7
HOSTILE = {
    "open boxes": "\\boxed{" * 15_000,
    "nested braces": "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "hashes": "####" * 25_000,
    "a long number": "#### " + "1" * 100_000 + "x",
    "backslashes": "\\" * 100_000 + "boxed{1",
}


def milliseconds(call) -> float:
    """The median of REPEATS calls."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main() -> None:
    # 512 responses of 30 KB, about 8192 tokens, full of braces before the final box.
    texts = ["\\frac{1}{2} + " * 2_300 + f"\\boxed{{{i}}}" for i in range(512)]
    references = [f"{i}.0" for i in range(512)]
    assert all(found.outcome is Outcome.CORRECT for found in grade_batch(texts, references))
    print(
        f"{'512 plain answers in responses of 30 KB':48}{milliseconds(lambda: grade_batch(texts, references)):8.1f} ms"
    )
    for name, text in HOSTILE.items():
        taken = milliseconds(lambda text=text: grade(text, "5", marker="Answer:"))
        print(f"{f'100 KB of hostile text: {name}':48}{taken:8.1f} ms")
    grade("\\boxed{\\sqrt{4}}", "2")  # starts math-verify
    started = time.perf_counter()
    pairs = [(f"\\boxed{{\\sqrt{{{i * i}}}+x}}", f"{i}+x") for i in range(2, 66)]
    grades = grade_batch([text for text, _ in pairs], [reference for _, reference in pairs])
    assert all(found.outcome is Outcome.CORRECT for found in grades)
    print(f"{'an answer that math-verify compares':48}{1000 * (time.perf_counter() - started) / len(pairs):8.1f} ms")


if __name__ == "__main__":
    main()
