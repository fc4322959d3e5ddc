"""Python as a tool of the policy: an environment per rollout for TRL's `environment_factory`, over a shared sandbox.

TRL calls the tools of one rollout after another. `otb.methods.tool_rollouts.ToolRollouts` has already run the programs
of the turn in parallel and left each outcome here, where the call finds it. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from otb.sandbox import Result, Sandbox

NO_OUTPUT = "(no output)"
MIN_TURNS = 2  # one to call, one to answer


@dataclass(frozen=True)
class Refusal:
    """The reply to a call that is refused. text: what the policy reads instead of a result."""

    text: str


MALFORMED = Refusal('refused: a call is {"name": "python", "arguments": {"code": "..."}} in valid JSON')


@dataclass
class ToolUse:
    """Outcomes of a rollout's calls, counted for the tool metrics. seconds: running time of its programs."""

    calls: int = 0
    failed: int = 0
    limited: int = 0
    refused: int = 0
    seconds: float = 0.0

    def count(self, outcome: Result | Refusal) -> None:
        """Adds the outcome of one call."""
        self.calls += 1
        if isinstance(outcome, Refusal):
            self.refused += 1
            return
        self.failed += outcome.status == "user_error"
        self.limited += outcome.status in ("timeout", "memory", "output_limit")
        self.seconds += outcome.seconds


class PythonTool:
    """The environment of one rollout, with the single tool `python`. TRL turns every public method into a tool.

    Nothing persists between calls: the sandbox starts each program afresh.

    Args:
        sandbox: runs the programs; shared by all rollouts.

    Attributes:
        use: outcomes of this rollout's calls so far.
        outcomes: outcomes of calls that ToolRollouts has run or refused before TRL asks for them, in order.
    """

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.reset()

    def reset(self, **row) -> None:
        """Starts a new rollout. row: the columns of its prompt, which no program can see."""
        self.use = ToolUse()
        self.outcomes: deque[Result | Refusal] = deque()

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. numpy and sympy are there. No variable outlives a call.

        Args:
            code: The program; print what you want to see.
        """
        outcome = self.outcomes.popleft() if self.outcomes else self._run(code)
        self.use.count(outcome)
        return outcome.text or NO_OUTPUT

    def _run(self, code: object) -> Result | Refusal:
        return self.sandbox.run(code) if isinstance(code, str) else MALFORMED
