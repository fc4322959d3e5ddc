"""Tasks: where prompts come from and how a response is rewarded. One file per task, one yaml per file in conf/task/.

A task is any object with the attributes of `Task`; Hydra builds it from `_target_`. Used by experiments/ and by the
variance laboratory; a task knows nothing of baselines or trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datasets import Dataset

    from otb.sandbox import Sandbox


class Task(Protocol):
    """What the harness asks of a task.

    `train_dataset` and `eval_dataset` return rows with a column `prompt` (chat messages, the last of them the user's)
    and a column `answer` (str, the reference); further columns are passed to `reward`. They raise ValueError, naming
    the value, the rule and the fix, before any model is loaded.

    `environment` makes the environment of one rollout out of the run's sandbox (`otb.tasks.python_tool.PythonTool`), or
    is None for single-turn tasks. `max_turns`, of tasks with an environment, counts assistant turns.
    `max_completion_length` counts own and tool tokens.
    """

    name: str
    max_completion_length: int
    environment: Callable[[Sandbox], object] | None

    def train_dataset(self) -> Dataset: ...

    def eval_dataset(self) -> Dataset: ...

    def reward(self, completions: list, answer: list[str], **columns) -> list[float | None]:
        """Terminal reward per rollout in [0, 1]; None = could not be scored. `completions`: lists of chat messages."""
        ...
