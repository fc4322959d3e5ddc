r"""Grades responses: extracts the final answer and compares it with the reference (math-verify). Called by otb.tasks.

Equal strings and plain numbers are decided here in microseconds; the rest goes to grader_process.py, which has a time
limit. Outcomes and rewards:

  correct          1     equal to the reference
  wrong            0     a readable answer, not equal
  unparsable       0     no \boxed{...} or `#### n`, or an unreadable answer: the policy gave no answer
  grader_timeout   None  no verdict within the time limit: unscored, never 0
  grader_error     None  the comparison failed or the reference is unreadable: unscored, never 0

An unscored rollout is left out of its group's sums, so no policy gains from answers that the grader cannot finish.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from otb.tasks.grader_process import MAX_PROCESSES, GraderPool

MAX_ANSWER_CHARS = 500  # the longest of 9,000 MATH references has 159
ROUNDING = Fraction(1, 10**5)  # math-verify rounds to 6 decimals, so it too distinguishes numbers further apart

_BOX = "\\boxed"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ and \\ are tokens, not braces
_HASHES = re.compile(r"####[ \t]*([-+]?(?:\\?\$)?[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?\\?%?)[ \t]*\.?[ \t]*$", re.MULTILINE)
_INTEGER = r"\d{1,60}|\d{1,3}(?:,\d{3}){1,20}|\d{1,3}(?: \d{3}){1,20}"
_DECIMAL = re.compile(rf"([-+]?)({_INTEGER})?(?:\.(\d{{1,60}}))?")
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{(\d{1,60})\}\{(\d{1,60})\}|\\frac(\d)(\d)|(\d{1,60})/(\d{1,60}))")
_SEPARATOR = re.compile(r"(?<=\d)(?:,\\!|\{,\})(?=\d{3})|\\[!,;:]")  # 1,\!234 and 1{,}234; the spaces \, \! \; \:
_VARIANTS = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\textbf{": "\\text{"}
_NUMBER_AS_TEXT = re.compile(r"\\text\{\(?(\d{1,60})\)?\}")  # AMC and AIME solutions box \textbf{(073)}
_CURRENCY = re.compile(r"^(-?)\\?\$")


class Outcome(StrEnum):
    """The outcomes of grading a response; the table above describes them."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    GRADER_TIMEOUT = "grader_timeout"
    GRADER_ERROR = "grader_error"


@dataclass(frozen=True)
class Grade:
    """The outcome of one rollout, the graded answer (None if there was none) and the reason if grading failed."""

    outcome: Outcome
    answer: str | None
    detail: str = ""

    @property
    def reward(self) -> float | None:
        """The reward: 1.0 correct; 0.0 wrong or unparsable; None if the grader, not the policy, failed."""
        if self.outcome in (Outcome.GRADER_TIMEOUT, Outcome.GRADER_ERROR):
            return None
        return float(self.outcome is Outcome.CORRECT)


def extract_answer(text: str, marker: str | None = None) -> str | None:
    r"""Returns the final answer stated in a text, or None.

    It is the last \boxed{...} with balanced braces. Without one, it is the rest of the last line that starts with
    `marker`, such as "Answer:", if the task has a marker, or else the number of the last line in GSM8K's form
    `#### 1,234`. Nothing else is an answer. Time is linear in the length of the text, whatever its braces.
    """
    end = len(text)
    while (start := text.rfind(_BOX, 0, end)) >= 0:
        # An earlier box must close before the next one starts: otherwise it would enclose an unclosed box.
        if (answer := _braced(text, start + len(_BOX), end)) is not None:
            return answer
        end = start
    if marker is not None:
        lines = re.findall(rf"^[ \t*]*{re.escape(marker)}[ \t*]*(\S.*)$", text, re.MULTILINE)
        return lines[-1].strip(" \t*") if lines else None
    numbers = _HASHES.findall(text)
    return numbers[-1] if numbers else None


def _braced(text: str, start: int, end: int) -> str | None:
    """Returns the text within the braces that open at `start` (after blanks) and close before `end`; None without."""
    while start < end and text[start].isspace():
        start += 1
    if start >= end or text[start] != "{":
        return None
    depth = 0
    for token in _BRACES.finditer(text, start, end):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[start + 1 : token.start()].strip()
    return None


def grade(response_text: str, reference: str, marker: str | None = None) -> Grade:
    """Grades one response, in any thread. `grade_batch` grades many, in several processes."""
    return grade_batch([response_text], [reference], marker)[0]


def grade_batch(response_texts: Sequence[str], references: Sequence[str], marker: str | None = None) -> list[Grade]:
    """Grades each response against its reference; equal pairs are compared once.

    Raises ValueError if there are not as many references as responses, RuntimeError if math-verify cannot be started.
    """
    answers = [extract_answer(text, marker) for text in response_texts]
    pairs = list(zip(answers, references, strict=True))
    cheap = {pair: _grade_cheaply(*pair) for pair in pairs}
    grades = {pair: grade for pair, grade in cheap.items() if grade is not None}
    hard = [(answer, reference) for answer, reference in cheap if (answer, reference) not in grades]
    with ThreadPoolExecutor(max_workers=min(MAX_PROCESSES, 1 + len(hard) // 16)) as threads:
        grades.update(zip(hard, threads.map(lambda pair: _grade_by_math_verify(*pair), hard), strict=True))
    return [grades[pair] for pair in pairs]


def _grade_cheaply(answer: str | None, reference: str) -> Grade | None:
    """Returns the grade if strings or plain numbers decide it; None if math-verify has to."""
    if not answer:
        return Grade(Outcome.UNPARSABLE, answer, "no final answer in the response")
    if answer == reference:
        return Grade(Outcome.CORRECT, answer)
    if len(answer) > MAX_ANSWER_CHARS:
        return Grade(Outcome.UNPARSABLE, answer, f"{len(answer)} characters; the limit is {MAX_ANSWER_CHARS}")
    plain, expected = normalised(answer), normalised(reference)
    if plain == expected:
        return Grade(Outcome.CORRECT, answer)
    a, b = number(plain), number(expected)
    if a is None or b is None or 0 < abs(a - b) <= ROUNDING:
        return None
    return Grade(Outcome.CORRECT if a == b else Outcome.WRONG, answer)


class _ComparisonFailed(Exception):
    """A comparison ended in an error that may not occur again."""


def _grade_by_math_verify(answer: str, reference: str) -> Grade:
    """Returns the grade from a comparison in a process of the pool."""
    try:
        return _verdict_of_math_verify(answer, reference)
    except _ComparisonFailed as failure:
        return Grade(Outcome.GRADER_ERROR, answer, str(failure))


@lru_cache(maxsize=8192)  # rollouts of a group repeat answers, and a timeout should cost its seconds only once
def _verdict_of_math_verify(answer: str, reference: str) -> Grade:
    """Returns the cached grade of a comparison. Raises _ComparisonFailed, which is not cached."""
    verdict, detail = _pool.compare(normalised(answer), normalised(reference))
    if verdict == "error":
        raise _ComparisonFailed(detail)
    return Grade(Outcome.GRADER_TIMEOUT if verdict == "timeout" else Outcome(verdict), answer, detail)


def normalised(answer: str) -> str:
    r"""Returns an answer without outer dollars, spacing commands, currency and percent signs and a full stop.

    A percent sign is a unit here: `50\%` equals `50` and not `0.5`, as in MATH, where the question fixes the unit.
    """
    plain = _SEPARATOR.sub("", " ".join(answer.split()))
    for variant, command in _VARIANTS.items():
        plain = plain.replace(variant, command)
    plain = plain.removesuffix(".").strip()
    if len(plain) > 2 and plain.startswith("$") and plain.endswith("$"):
        plain = plain.strip("$").strip()
    plain = _CURRENCY.sub(r"\1", plain)
    if match := _NUMBER_AS_TEXT.fullmatch(plain):
        plain = match[1]
    return plain.removesuffix("%").removesuffix("\\").strip() if plain.endswith("%") else plain


def number(plain: str) -> Fraction | None:
    """Returns the value of an integer (1,234 or 1 234), a decimal or a fraction of integers; None for other text."""
    if match := _FRACTION.fullmatch(plain):
        sign, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        return None if below == 0 else Fraction(-above if sign == "-" else above, below)
    match = _DECIMAL.fullmatch(plain)
    if match is None or (match[2] is None and match[3] is None):
        return None
    whole = re.sub("[, ]", "", match[2] or "0")
    value = Fraction(f"{whole}.{match[3] or 0}")
    return -value if match[1] == "-" else value


_pool = GraderPool(MAX_PROCESSES)
atexit.register(_pool.close)
