"""Draws and grades one batch of an evaluation with TRL's own rollout code, which supports tools and vLLM."""

from __future__ import annotations

from typing import NamedTuple

import torch
from omegaconf import OmegaConf

from experiments.evaluation.inputs import Inputs
from experiments.running.grpo_options import machine_options, sampling_limits
from otb.methods import Method
from otb.random_state import isolated_random_state
from otb.tasks.grading import Outcome, normalised, number
from otb.training.trainer import OTBTrainer


class Response(NamedTuple):
    """One sampled response. ending: "end" if the policy ended it, "length" or "turns" if a limit did."""

    messages: list[dict]
    ids: list[int]
    own_tokens: int
    ending: str


class Generated(Method):
    """Keeps the result of TRL's last generation."""

    def around_generation(self, make, prompts):
        self.last = make(prompts)
        return self.last


class SamplingTrainer(OTBTrainer):
    """An OTBTrainer that only samples batches of prompts, each from its own random state."""

    def __init__(self, *args, **kwargs):
        self.generated = Generated()
        super().__init__(*args, methods=[self.generated], **kwargs)

    def use_limits_of(self, task) -> None:
        """Applies the limits of this task to all further responses."""
        self.max_completion_length = task.max_completion_length
        if self.use_vllm:
            self.vllm_generation.max_completion_length = task.max_completion_length
        else:
            self.generation_config.max_new_tokens = task.max_completion_length
        if task.environment is not None:
            self.max_tool_calling_iterations = task.max_turns - 1  # the last turn can only answer

    def weights_changed(self) -> None:
        """Makes vLLM, which has its own copy of the weights, reload them before it samples."""
        self._last_loaded_step = -1

    def responses(self, rows: list[dict], seed: int) -> list[Response]:
        """Samples a response to the prompt of each row; equal rows, seed and weights give equal responses."""
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.llm.reset_prefix_cache()  # cached prefixes have other rounding errors
        with isolated_random_state(seed), torch.no_grad():
            self._generate_and_score_completions(rows)
        self._metrics["eval"].clear()
        self.seconds.clear()
        _, completion_ids, _, completions, *_ = self.generated.last
        own = self.sampled_tokens[:, 0].tolist()
        return [
            Response(messages, ids, count, ending)
            for messages, ids, count, ending in zip(completions, completion_ids, own, self.endings, strict=True)
        ]


def ungraded(completions: list, **columns) -> list[float]:
    """Returns rewards of 0: TRL requires a reward function, but responses are graded after they are drawn."""
    return [0.0] * len(completions)


def trainer_options(inputs: list[Inputs], eos_token_id: int) -> dict:
    """Returns the fields of OTBConfig for a trainer that only samples, and fits all these tasks."""
    # vLLM's context must fit the task with the longest prompt and response
    largest = max(inputs, key=lambda one: one.longest_prompt + one.task.max_completion_length)
    cfg, tasks = largest.cfg, [one.task for one in inputs]
    turns = [task.max_turns for task in tasks if task.environment is not None]
    options = OmegaConf.to_container(cfg.trainer, resolve=True)
    options |= machine_options(cfg) | sampling_limits(cfg, largest.longest_prompt, [eos_token_id])
    return options | {
        "output_dir": str(cfg.evaluations_dir),
        "use_cpu": options["use_cpu"] or not torch.cuda.is_available(),
        "bf16": False,  # the weights themselves have model.dtype
        "fp16": False,
        "gradient_checkpointing": False,
        "num_generations": 1,
        "per_device_train_batch_size": cfg.rollouts_per_batch,  # responses that vLLM samples at a time
        "max_completion_length": max(task.max_completion_length for task in tasks),
        "max_tool_calling_iterations": max(turns) - 1 if turns else None,
        "temperature": cfg.temperature,
        "seed": cfg.seed,
        "vllm_importance_sampling_correction": False,  # only the training loss needs its forward
        "vllm_enable_sleep_mode": False,  # nothing else needs the memory
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "log_level_replica": "error",
    }


# ---- grading


def sample_rows(task, rows: list[dict], pairs: list[tuple[int, int]], responses: list[Response], decode) -> list[dict]:
    """Returns the rows of samples.jsonl.

    rows: the task's rows, one per response. pairs: (problem, sample) of each response. decode: token ids -> text.
    """
    if not pairs:
        return []
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    graded = grades(task, [response.messages for response in responses], columns)
    samples = []
    for (problem, sample), response, grade in zip(pairs, responses, graded, strict=True):
        row = {"problem": problem, "sample": sample, **grade, "ending": response.ending}
        row["own_tokens"] = response.own_tokens
        if task.environment is not None:
            row["tool_tokens"] = len(response.ids) - response.own_tokens
        samples.append(row | {"response": decode(response.ids)})
    return samples


def grades(task, completions: list, columns: dict[str, list]) -> list[dict]:
    """Returns reward (None: not scored) per response and, if the task provides them, outcome, answer and vote.

    vote: the extracted answer in a normal form, so that equal answers are equal strings; None if it is unreadable.
    """
    if hasattr(task, "grades"):
        found = task.grades(completions, columns["answer"])
        return [
            {
                "reward": grade.reward,
                "outcome": str(grade.outcome),
                "answer": grade.answer,
                "vote": None if grade.outcome == Outcome.UNPARSABLE else vote(grade.answer),
            }
            for grade in found
        ]
    rewards = [None if reward is None else float(reward) for reward in task.reward(completions, **columns)]
    if not hasattr(task, "answers"):
        return [{"reward": reward} for reward in rewards]
    answers = task.answers(completions)
    pairs = zip(rewards, answers, strict=True)
    return [{"reward": reward, "answer": answer, "vote": vote(answer)} for reward, answer in pairs]


def vote(answer: str | None) -> str | None:
    """Returns the normalised answer, with numbers as fractions: `1/2`, `0.5` and `.50` give the same vote."""
    if not answer:
        return None
    plain = normalised(answer)
    value = number(plain)
    return plain if value is None else str(value)
