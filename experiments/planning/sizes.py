"""The size of each run of a sweep, and the assumptions about it: conf/plan.yaml, with what the command line replaces.

experiments/plan.py makes a `Plan` of every point of a sweep; estimate_table.py prints them. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from experiments.planning.costs import Card, Rates, Run
from experiments.planning.fit import ASSUMPTIONS
from experiments.planning.memory import Step
from experiments.running.build import is_off
from experiments.running.command_line import CONF, near_miss
from otb import baselines
from otb.errors import RunError

OPEN = ("cards", "evaluation_prompts")  # sections of conf/plan.yaml that take new names


class Plan(NamedTuple):
    """Runs of a sweep that cost the same: one configuration, several arms and seeds.

    Args:
        cfg: the configuration, of its first arm.
        label: `key=value` of the axes of the sweep that this is a point of.
        step: what the memory of a process depends on.
        runs: name of the baseline -> the size of a run. Arms differ in whether they take score norms.
        seeds: runs of each arm.
    """

    cfg: DictConfig
    label: str
    step: Step
    runs: dict[str, Run]
    seeds: int


# ---- the assumptions


def split_arguments(arguments: list[str]) -> tuple[DictConfig, list[str]]:
    """Returns the assumptions with what the command line replaces in them, and the arguments that are the run's.

    Raises RunError for a key below one of conf/plan.yaml that it does not have, or a value that is no positive number.
    """
    assumptions, remaining = OmegaConf.load(ASSUMPTIONS), []
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        top, *below = key.split(".")
        if top not in assumptions:
            remaining.append(argument)
            continue
        if below and top not in OPEN and OmegaConf.select(assumptions, key) is None:
            known = list(assumptions[top]) if OmegaConf.is_dict(assumptions[top]) else []
            raise RunError(f"{key} is no key of conf/plan.yaml.{near_miss(below[-1], known)} Known: {known}.")
        set_to(assumptions, key, value)
    for name, value in assumptions.items():
        may_be_null = name in ("training_tokens_per_second", "sampling_tokens_per_second")
        if name == "card" or OmegaConf.is_dict(value) or (value is None and may_be_null):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise RunError(f"{name}={value} must be a positive number; conf/plan.yaml says of what.")
    return assumptions, remaining


def card_of(assumptions: DictConfig) -> Card:
    """Returns the GPU that is planned for. Raises RunError for an unknown name or missing numbers."""
    cards = assumptions.cards
    if assumptions.card not in cards:
        raise RunError(
            f"card={assumptions.card} is not known.{near_miss(assumptions.card, cards)} Known: "
            f"{', '.join(cards)}. Another: cards.NAME.memory_gb=48 cards.NAME.tflops=181 cards.NAME.bandwidth_gb_s=864."
        )
    card = cards[assumptions.card]
    for name in ("memory_gb", "tflops", "bandwidth_gb_s"):
        if not isinstance(card.get(name), int | float) or card[name] <= 0:
            raise RunError(f"cards.{assumptions.card}.{name}={card.get(name)} must be a positive number.")
    return Card(card.memory_gb * 1e9, card.tflops * 1e12, card.bandwidth_gb_s * 1e9)


def rates_of(assumptions: DictConfig) -> Rates:
    """Returns the throughputs that conf/plan.yaml and the command line name."""
    return Rates(**{name: assumptions[name] for name in Rates.__dataclass_fields__})


def set_to(cfg: DictConfig, key: str, value: str) -> None:
    """Sets a key to what was typed, read as yaml."""
    OmegaConf.update(cfg, key, OmegaConf.create(f"value: {value}").value)


# ---- from a configuration to the size of a run


def needs_scores(cfg: DictConfig, arm: str) -> bool:
    """Whether the arm, or an option, makes the trainer take score norms."""
    target = OmegaConf.load(CONF / "baseline" / f"{arm}.yaml")._target_
    return bool(cfg.log_energy or cfg.measure_gradient_noise or baselines.needs_of(get_object(target)))


def run_of(cfg: DictConfig, assumptions: DictConfig, step: Step, scores: bool) -> Run:
    """Returns the size of a run of `cfg`. scores: whether its arm needs score norms."""
    evaluation = OmegaConf.select(cfg, "task.evaluation.name") or cfg.task.get("name") or ""
    rows = assumptions.evaluation_prompts.get(evaluation) or cfg.task.get("eval_prompts")
    limit = OmegaConf.select(cfg, "task.evaluation.max_eval_rows") or cfg.task.get("max_eval_rows")
    sets = [(rows, limit)]
    sets += [(assumptions.evaluation_prompts.get(name), cfg.evaluation.max_rows) for name in cfg.evaluation.tasks or ()]
    counts = [None if rows is None else min(rows, limit or rows) for rows, limit in sets]
    every = cfg.evaluation.every
    return Run(
        steps=cfg.steps,
        rollouts=cfg.prompts_per_step * cfg.group_size,
        mean_response=cfg.task.max_completion_length * assumptions.response_share,
        scores=scores,
        evaluations=1 + (-(-cfg.steps // every) if every else 1),
        evaluation_rollouts=None if None in counts else sum(counts) * cfg.evaluation.samples,
        extra_gpus=assumptions.server_gpus if step.sampler == "vllm_server" else 0,
        improves=not is_off(cfg, "improvement"),
    )


def kept_rollouts(cfg: DictConfig) -> int:
    """Returns the rollouts that a run keeps in rollouts/."""
    kept = -(-cfg.steps // cfg.rollouts.every) if cfg.rollouts.every else 0
    return kept * min(cfg.rollouts.groups, cfg.prompts_per_step) * cfg.group_size
