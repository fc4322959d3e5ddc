"""Builds and checks everything that sampling and grading a task needs, before any weights are read."""

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

    environment: makes the environment of one rollout, None for a single-turn task. longest_prompt: upper bound in
    tokens.
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
    """Returns the inputs of a task; raises RunError if rows, tokenizer and limits do not fit together."""
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
    """Returns the origin of the rows, for environment.json."""
    return {"eval": evaluation_facts(inputs.task, inputs.rows)}
