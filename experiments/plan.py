"""What a run or a sweep would need, before anything is started: tokens, memory per GPU, GPU-hours, disk.

python experiments/plan.py experiment=paper_tool_use hydra/launcher=slurm_8gpu card=h100-80gb
python experiments/plan.py model=qwen3-8b-base task=dapo_math group_size=4,16 response_share=0.3
It takes the keys of experiments/run.py, composes the same configuration, and takes beside them those of conf/plan.yaml,
what it assumes. docs/plan.md has the formulas, and how far they are from measured peaks. Imports no torch.
"""

from __future__ import annotations

import itertools
import sys
from copy import deepcopy
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from experiments.checks import check
from experiments.checks.trainer import check_parallel_and_sampler
from experiments.planning.estimate_table import print_plan
from experiments.planning.fit import processes_of, step_of
from experiments.planning.sizes import Plan, card_of, needs_scores, run_of, set_to, split_arguments
from experiments.running.command_line import CONF, accept_open_keys, refusals, refuse_unknown_choices

USUAL_CARD = "a100-80gb"
WITHOUT_COST = ("-m", "--multirun", "sweep", "wait")  # arguments of a sweep that say nothing about what it needs


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


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/plan.py ARGUMENTS`. Exits with 2 for what is refused; "does not fit" is an answer."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    with refusals():
        print_plan(*plan(arguments))


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    command_line(sys.argv[1:])
