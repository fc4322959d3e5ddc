"""Tasks say where prompts come from and how a response is rewarded. Each has a file here and a yaml in conf/task/.

A task is any object with the attributes of `Task`; Hydra builds it from `_target_`. experiments/ and the variance
laboratory use it; a task knows nothing about baselines or trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datasets import Dataset

    from otb.sandbox import Sandbox


class Task(Protocol):
    """The attributes that the harness needs from a task.

    Attributes:
        name: The task's name in errors and records.
        max_completion_length: The most own and tool tokens of a response.
        environment: Makes the environment of one rollout from the run's sandbox, for example
            `otb.tasks.python_tool.PythonTool`; None for single-turn tasks. A task with an environment also has
            `max_turns`, the number of assistant turns.
    """

    name: str
    max_completion_length: int

    @property
    def environment(self) -> Callable[[Sandbox], object] | None: ...

    def train_dataset(self) -> Dataset:
        """Returns rows to train on.

        Column `prompt` holds chat messages that end with the user's; column `answer` holds the reference, a str.
        Other columns are passed to `reward`. Raises ValueError before any model is loaded.
        """

    def eval_dataset(self) -> Dataset:
        """Returns held-out rows, as `train_dataset` does."""

    def reward(self, completions: list, answer: list[str], **columns) -> list[float | None]:
        """Returns a terminal reward in [0, 1] per rollout, None if it could not be scored.

        completions: a list of chat messages per rollout.
        """
