"""What a run or a sweep would need, before anything is started: tokens, memory per GPU, GPU-hours, disk.

python experiments/plan.py experiment=paper_tool_use hydra/launcher=slurm_8gpu card=h100-80gb
python experiments/plan.py model=qwen3-8b-base task=dapo_math group_size=4,16 response_share=0.3
It takes the keys of experiments/run.py, composes the same configuration, and takes beside them those of conf/plan.yaml,
what it assumes. docs/plan.md has the formulas, and how far they are from measured peaks. Imports no torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from experiments.checks import check
from experiments.checks.trainer import check_parallel_and_sampler
from experiments.planning.costs import Card, Rates, Run
from experiments.planning.fit import ASSUMPTIONS, processes_of, step_of
from experiments.planning.step import Step
from experiments.running.build import is_off
from experiments.running.command_line import CONF, accept_open_keys, near_miss, refusals, refuse_unknown_choices
from otb import baselines
from otb.errors import RunError

USUAL_CARD = "a100-80gb"
OPEN = ("cards", "evaluation_prompts")  # sections of conf/plan.yaml that take new names
WITHOUT_COST = ("-m", "--multirun", "sweep", "wait")  # arguments of a sweep that say nothing about what it needs


@dataclass(frozen=True)
class Setting:
    """Runs of a sweep that cost the same: one configuration, several arms and seeds.

    Args:
        cfg: the configuration, of its first arm.
        label: `key=value` of the axes that it stands at.
        arms: name of the baseline -> its runs (seeds).
    """

    cfg: DictConfig
    label: str
    arms: dict[str, int]


class Plan(NamedTuple):
    """A setting with what its costs follow from. Runs differ between arms by whether they take score norms."""

    setting: Setting
    step: Step
    runs: dict[str, Run]


def plan(arguments: list[str]) -> tuple[list[Plan], DictConfig]:
    """Returns a plan per setting of the sweep, and the assumptions. arguments: of the command line.

    Raises RunError for what experiments/run.py refuses, for an unknown card and for an architecture that is not known.
    """
    arguments = [argument for argument in arguments if argument.split("=")[0] not in WITHOUT_COST]
    assumptions, arguments = split_arguments(arguments)
    settings, plans = settings_of(arguments), []
    assumptions.card = assumptions.card or settings[0].cfg.card or USUAL_CARD
    memory = card_of(assumptions).memory
    for setting in settings:
        step = step_of(setting.cfg, memory, prompt_tokens=assumptions.prompt_tokens)
        scores = {arm: needs_scores(setting.cfg, arm) for arm in setting.arms}
        runs = {arm: run_of(setting.cfg, assumptions, step, scores[arm]) for arm in setting.arms}
        plans.append(Plan(setting, step, runs))
    return plans, assumptions


# ---- the command line


def split_arguments(arguments: list[str]) -> tuple[DictConfig, list[str]]:
    """Returns the assumptions with what the command line replaces in them, and the arguments that are the run's.

    Raises RunError for a key below one of conf/plan.yaml that it does not have, or a value that is no positive number.
    """
    assumptions = OmegaConf.load(ASSUMPTIONS)
    remaining = []
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        top, *below = key.split(".")
        if top not in assumptions:
            remaining.append(argument)
            continue
        if below and top not in OPEN and OmegaConf.select(assumptions, key) is None:
            known = list(assumptions[top]) if OmegaConf.is_dict(assumptions[top]) else []
            raise RunError(f"{key} is no key of conf/plan.yaml.{near_miss(below[-1], known)} Known: {known}.")
        OmegaConf.update(assumptions, key, OmegaConf.create(f"value: {value}").value)
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


def settings_of(arguments: list[str]) -> list[Setting]:
    """Returns the settings of the sweep that the arguments and their recipe describe; one where there is no sweep.

    A configuration is composed once per combination of the axes that change what a run costs.
    """
    arguments = accept_open_keys(arguments)
    refuse_unknown_choices(["-m", *arguments])
    parsed = [OverridesParser.create().parse_override(argument) for argument in arguments]
    plain = [override.input_line for override in parsed if not override.is_sweep_override()]
    swept = [override.input_line for override in parsed if override.is_sweep_override()]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        first = compose("config", plain, return_hydra_config=True)
        axes = axes_of(first, swept, {override.key_or_group for override in parsed})
        choice = first.hydra.runtime.choices["baseline"]
        arms = dict.fromkeys(axes.pop("baseline", [choice]), len(axes.pop("seed", [0])))
        composed = []
        for point in itertools.product(*([f"{key}={value}" for value in axes[key]] for key in axes)):
            cfg = at_point(first, plain, [f"baseline={next(iter(arms))}", *point])
            check_elsewhere(cfg)
            composed.append(Setting(cfg, " ".join(point), arms))
    return composed


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
    keys = dict(entry.partition("=")[::2] for entry in point)
    values = {key: value for key, value in keys.items() if not (CONF / key).is_dir()}
    choices = [f"{key}={value}" for key, value in keys.items() if key not in values]
    cfg = deepcopy(first) if not choices else compose("config", [*plain, *choices], return_hydra_config=True)
    OmegaConf.set_struct(cfg, False)
    for key, value in values.items():
        OmegaConf.update(cfg, key, OmegaConf.create(f"value: {value}").value)
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
    counts = [None if rows is None else min(rows, limit or rows)]
    for name in cfg.evaluation.tasks or ():
        more = assumptions.evaluation_prompts.get(name)
        counts.append(None if more is None else min(more, cfg.evaluation.max_rows or more))
    prompts = None if None in counts else sum(counts)
    every = cfg.evaluation.every
    return Run(
        steps=cfg.steps,
        rollouts=cfg.prompts_per_step * cfg.group_size,
        mean_response=cfg.task.max_completion_length * assumptions.response_share,
        scores=scores,
        evaluations=1 + (-(-cfg.steps // every) if every else 1),
        evaluation_rollouts=None if prompts is None else prompts * cfg.evaluation.samples,
        extra_gpus=assumptions.server_gpus if step.sampler == "vllm_server" else 0,
        improves=not is_off(cfg, "improvement"),
    )


def kept_rollouts(cfg: DictConfig) -> int:
    """Returns the rollouts that a run keeps in rollouts/."""
    kept = -(-cfg.steps // cfg.rollouts.every) if cfg.rollouts.every else 0
    return kept * min(cfg.rollouts.groups, cfg.prompts_per_step) * cfg.group_size


def rates_of(assumptions: DictConfig) -> Rates:
    """Returns the throughputs that conf/plan.yaml and the command line name."""
    return Rates(**{name: assumptions[name] for name in Rates.__dataclass_fields__})


def each_run(plans: list[Plan]) -> Iterator[tuple[Plan, str, Run, int]]:
    """Yields (plan, arm, run, how many of it) for every kind of run."""
    for entry in plans:
        for arm, run in entry.runs.items():
            yield entry, arm, run, entry.setting.arms[arm]


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/plan.py ARGUMENTS`. Exits with 2 for what is refused; "does not fit" is an answer."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    with refusals():
        plans, assumptions = plan(arguments)
        from experiments.planning.estimate_table import print_plan

        print_plan(plans, assumptions)


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    command_line(sys.argv[1:])
