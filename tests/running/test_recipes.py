"""Recipes, conf/experiment/*.yaml: every value of theirs reaches the runs, and the command line wins over them."""

import importlib.util
import re

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from experiments.sweeps.runs_of import plan
from tests.support.commands import ROOT
from tests.support.recipes import RECIPES, composed, runs_of


def written(recipe: str) -> dict:
    """The recipe's file as it stands."""
    return OmegaConf.to_container(OmegaConf.load(RECIPES[recipe]), resolve=False)


def leaves(node: dict, prefix: str = "") -> dict:
    """{"evaluation": {"samples": 32}} -> {"evaluation.samples": 32}."""
    flat = {}
    for key, value in node.items():
        name = f"{prefix.rstrip('.')}[{key}]" if "." in key else f"{prefix}{key}"  # an axis such as schedule.floor
        flat |= leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def test_recipes_are_what_a_user_would_start():
    """Those of the study are in study/recipes.yaml."""
    assert {"group_size", "stability", "paper_single_turn", "paper_tool_use"} <= RECIPES.keys()
    assert all(name.startswith(("paper_", "small_")) for name in RECIPES.keys() - {"group_size", "stability"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_value_of_a_recipe_is_the_one_that_its_runs_have(recipe):
    content = written(recipe)
    defaults = content.pop("defaults", [])
    cfg = composed(f"experiment={recipe}")
    expected = leaves(content)
    assert expected, "a recipe that sets nothing"
    composed_values = leaves(OmegaConf.to_container(cfg, resolve=False))
    assert {key: composed_values.get(key) for key in expected} == expected
    chosen = {key.removeprefix("override /"): choice for default in defaults for key, choice in default.items()}
    assert {group: cfg.hydra.runtime.choices[group] for group in chosen} == chosen


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_line_wins_over_every_plain_value_of_a_recipe(recipe):
    content = written(recipe)
    values = {key: value for key, value in leaves(content).items() if type(value) is int}
    cfg = composed(f"experiment={recipe}", *(f"{key}={value + 7}" for key, value in values.items()))
    assert {key: OmegaConf.select(cfg, key) for key in values} == {key: value + 7 for key, value in values.items()}
    assert composed(f"experiment={recipe}", "task=gsm8k").hydra.runtime.choices["task"] == "gsm8k"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_single_run_of_a_recipe_has_what_its_sweep_does_not_vary(recipe):
    """What the sweeper's params name is not set in a single run, which would have another task or group size."""
    swept = composed(f"experiment={recipe}").hydra.sweeper.params or {}
    keys = ("task", "baseline", "group_size", "learning_rate")
    assert [key for key in keys if "," not in str(swept.get(key, ","))] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_of_a_recipe_would_start(recipe, monkeypatch):
    installed = importlib.util.find_spec  # where the recipe runs vLLM is there; here it may not be
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm" or installed(name))
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        sweep = loader.load_configuration("config", [f"experiment={recipe}"], RunMode.MULTIRUN)
        runs = runs_of(sweep)
        of_one_seed = {tuple(part for part in run if not part.startswith("seed=")): run for run in runs}.values()
        asked = [[f"experiment={recipe}", *run] for run in of_one_seed]  # no check reads the seed
        jobs = plan(loader, sweep, asked, sweep.gpus or 1, here=False)
    assert [job.error for job in jobs] == [None] * len(asked)
    stated = re.search(r"(\d+) runs", RECIPES[recipe].read_text())
    assert stated is None or int(stated[1]) == len(runs)


def test_a_recipe_changes_only_what_it_names():
    """config.yaml's own values stand where a recipe says nothing, and without a recipe."""
    plain, stability = composed(), composed("experiment=stability")
    for cfg in (plain, stability):
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
    assert (plain.steps, stability.steps) == (80, 120)
    stability.steps = plain.steps
    assert stability == plain
