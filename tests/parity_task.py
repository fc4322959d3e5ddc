"""A task for tests of runs: arithmetic prompts, and a reward that has spread under an untrained policy."""

from dataclasses import dataclass
from typing import ClassVar

from otb.tasks.arithmetic import Arithmetic


@dataclass(frozen=True)
class Parity(Arithmetic):
    """`task._target_=tests.parity_task.Parity` on the command line, with the fields of Arithmetic."""

    name: ClassVar[str] = "parity"

    def reward(self, completions: list, **columns) -> list[float]:
        """1.0 where the sum of the response's characters is odd."""
        return [float(sum(map(ord, messages[-1]["content"])) % 2) for messages in completions]
