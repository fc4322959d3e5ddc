"""The sums of `arithmetic_long` with Python as a tool: long responses of several turns. Needs no network.

Now and then the demonstrator lets Python add the next three to five terms to the total, and continues from the result.
Python does not slip, but he mistypes terms, so checking pays with tools as well. A policy warm-started on this is right
two times in five.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from otb.tasks.arithmetic_long import LARGEST_DIGIT, ArithmeticLong, Demonstrator, Terms, terms_of
from otb.tasks.arithmetic_tools import ArithmeticTools, replies, says

CALL_RATE = 0.06  # per step
TERMS_OF_A_CALL = (3, 5)
MISTYPE_RATE = 0.10  # per call
SLIP_RATES = {"careful": 0.005, "careless": 0.06}  # per step in the head


@dataclass(frozen=True)
class ArithmeticLongTools(ArithmeticLong, ArithmeticTools):
    """The problems of `ArithmeticLong` with the tool and the arguments of `ArithmeticTools`."""

    eval_prompts: int = 64
    max_completion_length: int = 512
    max_turns: int = 6

    name: ClassVar[str] = "arithmetic_long_tools"

    def _demonstrate(self, problem: str, draw: random.Random, noise: float) -> list[dict]:
        return ToolDemonstrator(draw, noise).solve(terms_of(problem))


class ToolDemonstrator(Demonstrator):
    """Solves one problem partly in the head, partly with Python calls."""

    slip_rates: ClassVar[dict[str, float]] = SLIP_RATES
    MAX_CALLS: ClassVar[int] = 4  # fewer than the turns that a rollout has by default

    def __init__(self, draw: random.Random, noise: float):
        super().__init__(draw, noise)
        self.said: list[dict] = []

    def messages(self, last: str) -> list[dict]:
        """Returns the messages of the solution, with calls and replies."""
        return [*self.said, *super().messages(last)]

    def go_on(self, total: int, left: Terms, rate: float) -> tuple[int, Terms]:
        """Adds a few terms with a call, or else the next one without. Returns (total, terms left)."""
        may_call = total > 0 and len(left) >= TERMS_OF_A_CALL[0] and len(self.said) < 2 * self.MAX_CALLS
        if not may_call or self.draw.random() > CALL_RATE:
            return super().go_on(total, left, rate)
        count = min(self.draw.randint(*TERMS_OF_A_CALL), len(left))
        digits = [digit for _, digit in left[:count]]
        if self.draw.random() < MISTYPE_RATE * self.noise:
            digits[self.draw.randrange(count)] = self.draw.randint(1, LARGEST_DIGIT)
        code = f"print({'+'.join(map(str, [total, *digits]))})"
        total += sum(digits)
        self.said += [says(self.text, code), replies(str(total))]
        self.text = ""
        return total, left[count:]
