"""Long sums of 10 to 16 lettered digits, which are added up, checked in reverse order and redone. Needs no network.

`a3 b1 c5 ...` is added up term by term (`b1=4, c5=9, `). A demonstrator goes through the terms carefully or carelessly,
and slips now and then; he notices some slips at once (`no c5=9, `). After the first pass he usually checks the total
from the last term backwards, and as long as two totals in a row differ he redoes the sum, until he gives up. Mistakes
are made, noticed and repaired at every stage, so the chance of ending right changes all along the response. A policy
warm-started on this is right two times in five.
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
LARGEST_DIGIT = 5  # with 9, the tiny policy needs a warm start twice as long
CARELESS_SHARE = 0.5  # of passes
SLIP_RATES = {"careful": 0.005, "careless": 0.10}  # per step
NOTICE_RATE = 0.3  # of slips, at once
CHECK_RATE = 0.9  # of first totals
REDO_RATE = 0.75  # of totals that differ from the one before
MAX_PASSES = 5
Terms = list[tuple[str, int]]


@dataclass(frozen=True)
class ArithmeticLong(Arithmetic):
    """A task of sums of 10 to 16 digits; most responses have 70 to 340 own tokens. Arguments as in `Arithmetic`."""

    max_completion_length: int = 448

    name: ClassVar[str] = "arithmetic_long"

    def _problems(self, use: str, draw: random.Random) -> Iterator[str]:
        while True:
            count = draw.randint(*TERMS)
            problem = " ".join(f"{letter}{draw.randint(1, LARGEST_DIGIT)}" for letter in LETTERS[:count])
            if is_for(use, problem):
                yield problem

    def _answer(self, problem: str) -> int:
        return sum(digit for _, digit in terms_of(problem))

    def _demonstrate(self, problem: str, draw: random.Random, noise: float) -> list[dict]:
        return Demonstrator(draw, noise).solve(terms_of(problem))


def terms_of(problem: str) -> Terms:
    """Returns the letters and digits of a problem: 'a3 b1' -> [('a', 3), ('b', 1)]."""
    return [(letter, int(digit)) for letter, digit in re.findall(r"([a-p])(\d)", problem)]


class Demonstrator:
    """Solves one problem in words, which depend only on the problem, the noise and the state of `draw`."""

    slip_rates: ClassVar[dict[str, float]] = SLIP_RATES

    def __init__(self, draw: random.Random, noise: float):
        self.draw, self.noise, self.text = draw, noise, ""

    def solve(self, terms: Terms) -> list[dict]:
        """Returns the messages of a solution."""
        self.text += "first "
        total, passes = self.add_up(terms), 1
        checked = self.draw.random() < CHECK_RATE
        while checked:
            before, passes = total, passes + 1
            self.text += "check " if passes == 2 else "redo "
            total = self.add_up(terms if passes % 2 else terms[::-1])
            checked = total != before and passes < MAX_PASSES and self.draw.random() < REDO_RATE
            self.text += "no " if checked else ""
        return self.messages(f"{self.text}\\boxed{{{total}}}")

    def messages(self, last: str) -> list[dict]:
        """Returns the messages of the solution. last: text of the last message."""
        return [{"role": "assistant", "content": last}]

    def add_up(self, terms: Terms) -> int:
        """Goes through the terms once and returns the total."""
        careless = self.draw.random() < CARELESS_SHARE * self.noise
        rate = self.slip_rates["careless" if careless else "careful"]
        total, left = 0, terms
        while left:
            total, left = self.go_on(total, left, rate)
        self.text += f"total {total}. "
        return total

    def go_on(self, total: int, left: Terms, rate: float) -> tuple[int, Terms]:
        """Adds the next term in the head and returns (total, terms left). rate: of slips, except at the first term."""
        (letter, digit), *rest = left
        right = total + digit
        slipped = total > 0 and self.draw.random() < rate
        total = max(1, near(right, self.draw)) if slipped else right
        self.text += f"{letter}{digit}={total}, "
        if slipped and self.draw.random() < NOTICE_RATE:
            total = right
            self.text += f"no {letter}{digit}={total}, "
        return total, rest
