"""Sums and differences of single digits, with solutions of very different length and certainty. Needs no network.

A demonstrator adds up term by term, tersely (`+8=9`) or in full (`1+8=9`). At each step he may slip. Either he notices
(`no 1+8=9`), or he gets confused: he slips more easily from then on, and rambles about the last step before he boxes a
wrong total. A policy warm-started on this is right about half the time, and its wrong responses are the long ones.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from datasets import Dataset

TERMS = (3, 4)
LARGEST_TOTAL = 12
TERSE_SHARE = 0.5
SLIP_RATE = 0.2  # per step while the demonstrator is sure of himself
CONFUSED_SLIP_RATE = 0.5  # per step after a slip that he did not notice
NOTICE_RATE = 0.2
RAMBLE_ROUNDS = (2, 8)
HEDGES = ("hmm ", "wait ", "maybe ", "not sure ", "let me see ", "or ")
BOXED = re.compile(r"\\boxed\{\s*([+-]?[0-9]{1,18})\s*\}")
# The eighths of all problems that each use draws from: the uses never share a problem, whatever their seeds.
USES = {"evaluate": range(0, 1), "train": range(1, 4), "demonstrate": range(4, 8)}


@dataclass(frozen=True)
class Arithmetic:
    """A task of left-to-right chains of + and - such as `7+8-3+9`, with running totals in [0, 12].

    train_prompts, eval_prompts: rows of the two datasets. seed: selects the problems (and has nothing to do with the
    warm start). max_completion_length: own tokens; a response cut there has no answer, so its reward is 0.
    instruction: text below the sum in every prompt; None for a policy that has learned to answer a bare sum.
    """

    train_prompts: int = 2048
    eval_prompts: int = 128
    seed: int = 0
    max_completion_length: int = 64
    instruction: str | None = None

    name: ClassVar[str] = "arithmetic"
    environment: ClassVar[type | None] = None

    def __post_init__(self) -> None:
        for key, most in (("train_prompts", 4096), ("eval_prompts", 1024)):
            count = getattr(self, key)
            if not 1 <= count <= most:
                raise ValueError(f"{key}={count} must be 1 to {most}, the most problems it may hold. Try {key}=128.")

    def train_dataset(self) -> Dataset:
        """Returns `train_prompts` distinct problems: columns `prompt` (chat messages) and `answer` (str)."""
        return self._dataset("train", self.train_prompts)

    def eval_dataset(self) -> Dataset:
        """Returns `eval_prompts` distinct problems that occur neither in training nor in the demonstrations."""
        return self._dataset("evaluate", self.eval_prompts)

    def reward(self, completions: list, answer: list[str], **columns) -> list[float]:
        """Returns 1.0 if the last `\\boxed{}` of the last assistant message holds the answer, else 0.0.

        completions: a list of chat messages per rollout; answer: the reference, an integer as str.
        """
        return [float(boxed_integer(c) == int(a)) for c, a in zip(completions, answer, strict=True)]

    def answers(self, completions: list) -> list[str | None]:
        """Returns the answers that `reward` compares with the reference: boxed integers as str, None without one."""
        found = [boxed_integer(completion) for completion in completions]
        return [None if integer is None else str(integer) for integer in found]

    def demonstrations(self, seed: int, n: int, noise: float = 1.0) -> list[list[dict]]:
        """Returns `n` demonstrations as chat messages (user, assistant), for warm_start.py; a larger `n` appends more.

        noise scales the rate of slips: at 0 all solutions are right, at 1 about two thirds are.
        """
        draw = random.Random(f"demonstrate {seed} {noise}")
        problems = itertools.islice(self._problems("demonstrate", draw), n)
        return [[*self._prompt(p), *self._demonstrate(p, draw, noise)] for p in problems]

    def _problems(self, use: str, draw: random.Random) -> Iterator[str]:
        """Yields random problems of one use, endlessly."""
        while True:
            terms = draw.randint(*TERMS)
            signs = [draw.choice("+-") for _ in range(terms - 1)]
            problem = "".join([str(draw.randint(1, 9)), *(sign + str(draw.randint(1, 9)) for sign in signs)])
            totals = running_totals(problem)
            if min(totals) >= 0 and max(totals) <= LARGEST_TOTAL and is_for(use, problem):
                yield problem

    def _answer(self, problem: str) -> int:
        return running_totals(problem)[-1]

    def _demonstrate(self, problem: str, draw: random.Random, noise: float) -> list[dict]:
        """Returns the messages after the prompt; a pure function of its arguments and the state of `draw`."""
        return [{"role": "assistant", "content": _solve(problem, draw, noise)}]

    def _prompt(self, problem: str) -> list[dict]:
        text = problem if self.instruction is None else f"{problem}\n\n{self.instruction}"
        return [{"role": "user", "content": text}]

    def _dataset(self, use: str, count: int) -> Dataset:
        from datasets import Dataset

        distinct: dict[str, None] = {}
        for problem in self._problems(use, random.Random(f"{use} {self.seed}")):
            distinct[problem] = None
            if len(distinct) == count:
                break
        return Dataset.from_list([{"prompt": self._prompt(p), "answer": str(self._answer(p))} for p in distinct])


def boxed_integer(completion: list) -> int | None:
    """Returns the integer in the last `\\boxed{}` of the last assistant message; None if it has none."""
    messages = completion if isinstance(completion, list) else []
    texts = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
    boxed = BOXED.findall(texts[-1]) if texts and isinstance(texts[-1], str) else []
    return int(boxed[-1]) if boxed else None


def running_totals(problem: str) -> list[int]:
    """Returns the total after each term: '7+8-3' -> [7, 15, 12]."""
    totals: list[int] = []
    for term in re.findall(r"[+-]?\d+", problem):
        totals.append((totals[-1] if totals else 0) + int(term))
    return totals


def is_for(use: str, problem: str) -> bool:
    """Returns whether a problem belongs to a use of `USES`; the problem's digest alone decides."""
    return hashlib.sha256(problem.encode()).digest()[0] % 8 in USES[use]


def _solve(problem: str, draw: random.Random, noise: float) -> str:
    """Returns one solution; a pure function of the problem, the noise and the state of `draw`."""
    first, *steps = re.findall(r"[+-]?\d", problem)
    terse = draw.random() < TERSE_SHARE
    total, sure, text = int(first), True, ""
    for step in steps:
        right = total + int(step)
        left_side = f"{step}=" if terse else f"{total}{step}="
        slipped = draw.random() < (SLIP_RATE if sure else CONFUSED_SLIP_RATE) * noise
        total = near(right, draw) if slipped else right
        text += f"{left_side}{total}, "
        if slipped and draw.random() < NOTICE_RATE:
            total = right
            text += f"no {left_side}{total}, "
        elif slipped:
            sure = False
    if not sure:
        total, rambling = ramble(steps[-1], total, draw)
        text += rambling
    return f"{text}\\boxed{{{total}}}"


def near(value: int, draw: random.Random) -> int:
    """Returns a wrong value close to `value`."""
    return value + draw.choice((-3, -2, -1, 1, 2, 3))


def ramble(step: str, total: int, draw: random.Random) -> tuple[int, str]:
    """Repeats the last step with wrong totals. Returns the final total and the text."""
    text = ""
    for _ in range(draw.randint(*RAMBLE_ROUNDS)):
        total = near(total, draw)
        text += f"{draw.choice(HEDGES)}{step}={total}, "
    return total, text
