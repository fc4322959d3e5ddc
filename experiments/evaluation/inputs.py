"""What the samples of a task are drawn and graded with; checked before any weights are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from omegaconf import DictConfig

from experiments.running.data import evaluation_facts
from otb.errors import RunError
from otb.methods.tool_calls import check_tool_template
from otb.policies.models import check_prompt_lengths
from otb.sandbox import Sandbox
from otb.tasks import Task


class Inputs(NamedTuple):
    """A task with its evaluation rows.

    environment: makes that of one rollout, None for a single-turn task. longest_prompt: in tokens, at the most.
    """

    cfg: DictConfig
    task: Task
    rows: list[dict]
    environment: Callable | None
    longest_prompt: int = 0

    @property
    def tools(self) -> list[Callable] | None:
        """The tools that the chat template describes in every prompt."""
        return None if self.environment is None else [self.environment().python]


def task_inputs(cfg: DictConfig, task: Task, sandbox: Sandbox | None, tokenizer, model_config) -> Inputs:
    """Returns the inputs of a task; raises RunError where rows, tokenizer and limits do not fit."""
    try:
        dataset = task.eval_dataset()
    except (ValueError, FileNotFoundError) as error:
        raise RunError(str(error)) from error
    inputs = Inputs(cfg, task, list(dataset), None if task.environment is None else partial(task.environment, sandbox))
    if inputs.tools:
        check_tool_template(tokenizer, cfg.model.name)
    limits = (cfg.max_prompt_length, task.max_completion_length)
    longest = check_prompt_lengths(dataset["prompt"], tokenizer, model_config, *limits, inputs.tools)
    return inputs._replace(longest_prompt=longest)


def data_facts(inputs: Inputs) -> dict:
    """Returns where the rows come from, for environment.json."""
    return {"eval": evaluation_facts(inputs.task, inputs.rows)}
