"""The sums of `arithmetic`, solved partly in the head and partly with Python: the offline task with tools.

Before each step the demonstrator may hand the rest of the sum to Python; until then he adds in his head, where he slips
as in `arithmetic`. A call is right more often than three steps in the head, but not always: he may mistype a term,
forget to print, or distrust a right result. A policy warm-started on this is right about half the time.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from otb.tasks.arithmetic import NOTICE_RATE, Arithmetic, near, ramble, running_totals
from otb.tasks.python_tool import MIN_TURNS, NO_OUTPUT, PythonTool

CALL_RATE = 0.35  # per step, while he is sure of himself
SLIP_RATE = 0.3  # per step in the head
MISTYPE_RATE = 0.15  # per call
FORGET_RATE = 0.1  # per call: print is missing
DISTRUST_RATE = 0.1  # per result


@dataclass(frozen=True)
class ArithmeticTools(Arithmetic):
    """The problems of `Arithmetic` with a Python tool.

    max_completion_length: own and tool tokens together. max_turns: assistant turns; the last one can only answer.
    Everything else as in `Arithmetic`.
    """

    eval_prompts: int = 64
    max_completion_length: int = 72
    max_turns: int = 5

    name: ClassVar[str] = "arithmetic_tools"
    environment: ClassVar[type | None] = PythonTool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < MIN_TURNS:
            raise ValueError(f"max_turns={self.max_turns} must be at least {MIN_TURNS}. Try max_turns=5.")

    def demonstrations(self, seed: int, n: int, noise: float = 1.0) -> list[list[dict]]:
        """Returns demonstrations like `Arithmetic`'s, with a system message about tools and with Python's replies."""
        tools = {"role": "system", "content": "<tools>"}
        return [[tools, *chat] for chat in super().demonstrations(seed, n, noise)]

    def _demonstrate(self, problem: str, draw: random.Random, noise: float) -> list[dict]:
        first, *steps = re.findall(r"[+-]?\d", problem)
        total, sure, text = int(first), True, ""
        for done, step in enumerate(steps):
            if sure and draw.random() < CALL_RATE:
                return _by_python(text, f"{total}{''.join(steps[done:])}", draw, noise)
            right = total + int(step)
            slipped = draw.random() < SLIP_RATE * noise
            before, total = total, near(right, draw) if slipped else right
            text += f"{before}{step}={total}, "
            if slipped and draw.random() < NOTICE_RATE:
                total = right
                text += f"no {before}{step}={total}, "
            elif slipped:
                sure = False
        if not sure:
            total, rambling = ramble(steps[-1], total, draw)
            text += rambling
        return [says(f"{text}\\boxed{{{total}}}")]


def _by_python(text: str, expression: str, draw: random.Random, noise: float) -> list[dict]:
    """Returns the messages from the call to the answer. text: the words before the call in the same message."""
    if draw.random() < MISTYPE_RATE * noise:
        at = draw.choice([match.start() for match in re.finditer(r"\d", expression)])
        expression = f"{expression[:at]}{draw.randint(1, 9)}{expression[at + 1 :]}"
    messages = []
    if draw.random() < FORGET_RATE * noise:
        messages += [says(text, expression), replies(NO_OUTPUT)]
        text = ""
    result = running_totals(expression)[-1]
    messages += [says(text, f"print({expression})"), replies(str(result))]
    if draw.random() < DISTRUST_RATE * noise:
        doubtful, rambling = ramble(re.findall(r"[+-]?\d+", expression)[-1], result, draw)
        return [*messages, says(f"{rambling}\\boxed{{{doubtful}}}")]
    return [*messages, says(f"\\boxed{{{result}}}")]


def says(text: str, code: str | None = None) -> dict:
    """Returns a message of the assistant, with a Python call if there is code."""
    message = {"role": "assistant", "content": text}
    if code is None:
        return message
    return message | {"tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": code}}}]}


def replies(text: str) -> dict:
    """Returns a message of the tool."""
    return {"role": "tool", "name": "python", "content": text}
