"""What a command describes to plan: the settings of its sweep that cost differently, and the assumptions about them.

experiments/plan.py calls `plan`; estimate_table.py prints what it returns. Imports no torch.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from experiments.checks import check, check_parallel_and_sampler
from experiments.planning.costs import Card, Rates, Run
from experiments.planning.fit import ASSUMPTIONS, processes_of, step_of
from experiments.planning.memory import Step
from experiments.running.build import is_off
from experiments.running.command_line import CONF, accept_open_keys, near_miss, refuse_unknown_choices
from otb import baselines
from otb.errors import RunError

USUAL_CARD = "a100-80gb"
OPEN = ("cards", "evaluation_prompts")  # sections of conf/plan.yaml that take new names
WITHOUT_COST = ("-m", "--multirun", "sweep", "wait")  # arguments of a sweep that say nothing about what it needs


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


def plan(arguments: list[str]) -> tuple[list[Plan], DictConfig]:
    """Returns a plan per setting of the sweep, and the assumptions. arguments: of the command line.

    Raises RunError for what experiments/run.py refuses, for an unknown card and for an architecture that is not known.
    """
    assumptions, arguments = split_arguments(arguments)
    points, arms, seeds = points_of([given for given in arguments if given.split("=")[0] not in WITHOUT_COST])
    assumptions.card = assumptions.card or points[0][0].card or USUAL_CARD
    memory, plans = card_of(assumptions).memory, []
    for cfg, label in points:
        step = step_of(cfg, memory, prompt_tokens=assumptions.prompt_tokens)
        runs = {arm: run_of(cfg, assumptions, step, needs_scores(cfg, arm)) for arm in arms}
        plans.append(Plan(cfg, label, step, runs, seeds))
    return plans, assumptions


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


# ---- the points of a sweep


def points_of(arguments: list[str]) -> tuple[list[tuple[DictConfig, str]], list[str], int]:
    """Returns (configuration, label) of each point of the sweep, its arms, and its number of seeds.

    The arguments and their recipe describe the sweep; without one there is a single point. A configuration is composed
    once per combination of the axes that change what a run costs.
    """
    arguments = accept_open_keys(arguments)
    refuse_unknown_choices(["-m", *arguments])
    parsed = [OverridesParser.create().parse_override(argument) for argument in arguments]
    plain = [override.input_line for override in parsed if not override.is_sweep_override()]
    swept = [override.input_line for override in parsed if override.is_sweep_override()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        first = compose("config", plain, return_hydra_config=True)
        axes = axes_of(first, swept, {override.key_or_group for override in parsed})
        arms = list(dict.fromkeys(axes.pop("baseline", [first.hydra.runtime.choices["baseline"]])))
        seeds, points = len(axes.pop("seed", [0])), []
        for point in itertools.product(*([f"{key}={value}" for value in axes[key]] for key in axes)):
            cfg = at_point(first, plain, [f"baseline={arms[0]}", *point])
            check_elsewhere(cfg)
            points.append((cfg, " ".join(point)))
    return points, arms, seeds


def check_elsewhere(cfg: DictConfig) -> None:
    """Raises RunError for what a run refuses, but not for packages that its machine may have and this one has not."""
    check_parallel_and_sampler(cfg)
    checked = deepcopy(cfg)
    checked.parallel, checked.rollouts_by = {"name": "ddp", "trainer": {}}, {"name": "hf", "rows": None}
    checked.geometric_ratio_band = None  # it goes with vLLM alone
    checked.card = None  # whether it fits is what the plan says
    check(checked, processes_of(cfg))


def axes_of(cfg: DictConfig, swept: list[str], typed: set[str]) -> dict[str, list[str]]:
    """Returns key -> values of a sweep: the recipe's (hydra.sweeper.params), replaced by what was typed."""
    params = OmegaConf.to_container(cfg.hydra.sweeper.get("params") or OmegaConf.create({}))
    lines = [f"{key}={value}" for key, value in params.items() if key.lstrip("+") not in typed]
    axes = {}
    for line in [*lines, *swept]:
        override = OverridesParser.create().parse_override(line)
        values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_string()]
        axes[override.key_or_group] = list(values)
    return axes


def at_point(first: DictConfig, plain: list[str], point: list[str]) -> DictConfig:
    """Returns the configuration at a point of the sweep: keys are set in a copy, choices of a group are composed."""
    choices = [entry for entry in point if (CONF / entry.partition("=")[0]).is_dir()]
    cfg = deepcopy(first) if not choices else compose("config", [*plain, *choices], return_hydra_config=True)
    OmegaConf.set_struct(cfg, False)
    for entry in point:
        if entry not in choices:
            set_to(cfg, *entry.split("=", 1))
    return cfg


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
