"""Tasks say where prompts come from and how a response is rewarded. Each has a file here and a yaml in conf/task/.

A task is any object with the attributes of `Task`; Hydra builds it from `_target_`. experiments/ and the variance
laboratory use it; a task knows nothing of baselines or trainers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datasets import Dataset

    from otb.sandbox import Sandbox


class Task(Protocol):
    """The attributes that the harness asks of a task.

    Attributes:
        name: What errors and records call it.
        max_completion_length: Own and tool tokens of a response, at most.
        environment: What makes the environment of one rollout out of the run's sandbox, such as
            `otb.tasks.python_tool.PythonTool`; None for single-turn tasks. A task with an environment also has
            `max_turns`, the number of assistant turns.
    """

    name: str
    max_completion_length: int

    @property
    def environment(self) -> Callable[[Sandbox], object] | None: ...

    def train_dataset(self) -> Dataset:
        """Returns rows to train on.

        Column `prompt` holds chat messages, the last of them the user's; column `answer` the reference, a str; further
        columns are passed to `reward`. Raises ValueError with value, rule and fix, before any model is loaded.
        """

    def eval_dataset(self) -> Dataset:
        """Returns held-out rows, as `train_dataset` does."""

    def reward(self, completions: list, answer: list[str], **columns) -> list[float | None]:
        """Returns a terminal reward in [0, 1] per rollout, None where it could not be scored.

        completions: a list of chat messages per rollout.
        """
