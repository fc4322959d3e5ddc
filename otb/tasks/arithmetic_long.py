"""Sums of 10 to 16 lettered terms, added up, checked in the reverse order and redone: long responses. Offline.

`a7 b4 c9 ...` is added up term by term (`b4=11, c9=20, `). A demonstrator goes through the terms carefully or
carelessly, and slips now and then; some slips he notices at once (`no c9=20, `). After the first pass he usually checks
the total from the last term backwards, and while two totals in a row differ he redoes the sum, until he has had enough.
So a mistake can be made, noticed and repaired at every stage: the chance to end right moves along the response, and
responses that go wrong are the longest. A policy warm-started on that is right about half the time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from otb.tasks.arithmetic import Arithmetic, is_for, near

LETTERS = "abcdefghijklmnop"
TERMS = (10, 16)
LARGEST_DIGIT = 9
LARGEST_TOTAL = 99
CARELESS_SHARE = 0.5  # of passes
SLIP_RATES = {"careful": 0.005, "careless": 0.06}  # per step
NOTICE_RATE = 0.3  # of slips, at once
CHECK_RATE = 0.9  # whether the first total is checked at all
REDO_RATE = 0.75  # whether totals that differ are followed by another pass
MOST_PASSES = 5


@dataclass(frozen=True)
class ArithmeticLong(Arithmetic):
    """A task of sums of 10 to 16 digits, whose solutions take 50 to 400 own tokens.

    Everything as in `Arithmetic`.
    """

    max_completion_length: int = 448

    name: ClassVar[str] = "arithmetic_long"

    def _problems(self, use: str, draw: random.Random) -> Iterator[str]:
        while True:
            digits = [draw.randint(1, LARGEST_DIGIT) for _ in range(draw.randint(*TERMS))]
            problem = " ".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits, strict=False))
            if sum(digits) > LARGEST_TOTAL:
                continue
            if is_for(use, problem):
                yield problem

    def _answer(self, problem: str) -> int:
        return sum(digits_of(problem).values())

    def _demonstrate(self, problem: str, draw: random.Random, noise: float) -> list[dict]:
        return [{"role": "assistant", "content": _solve(digits_of(problem), draw, noise)}]


def digits_of(problem: str) -> dict[str, int]:
    """Returns letter -> digit of a problem: 'a7 b4' -> {'a': 7, 'b': 4}."""
    return {letter: int(digit) for letter, digit in re.findall(r"([a-p])(\d)", problem)}


def _solve(terms: dict[str, int], draw: random.Random, noise: float) -> str:
    """Returns one solution; a pure function of the problem, the noise and the state of `draw`."""
    total, text = _add_up(terms, draw, noise)
    text = f"first {text}total {total}. "
    forwards, passes, checked = True, 1, draw.random() < CHECK_RATE
    while checked:
        before, forwards, passes = total, not forwards, passes + 1
        order = terms if forwards else dict(reversed(terms.items()))
        total, again = _add_up(order, draw, noise)
        text += f"{'check ' if passes == 2 else 'redo '}{again}total {total}. "
        checked = total != before and passes < MOST_PASSES and draw.random() < REDO_RATE
        if checked:
            text += "no "
    return f"{text}\\boxed{{{total}}}"


def _add_up(terms: dict[str, int], draw: random.Random, noise: float) -> tuple[int, str]:
    """Goes through the terms once. Returns the total that it comes to and the text."""
    rate = SLIP_RATES["careless" if draw.random() < CARELESS_SHARE * noise else "careful"]
    total, text = 0, ""
    for letter, digit in terms.items():
        right = total + digit
        slipped = bool(text) and draw.random() < rate
        total = max(0, near(right, draw)) if slipped else right
        text += f"{letter}{digit}={total}, "
        if slipped and draw.random() < NOTICE_RATE:
            total = right
            text += f"no {letter}{digit}={total}, "
    return total, text
