"""Reads study/recipes.yaml and gives the runs of each recipe as overrides of experiments/run.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from otb.errors import RunError
from study.collected import CONFIGURED
from study.rates import tuned_rate

FILE = Path(__file__).with_name("recipes.yaml")
DEFAULT_SIZE = 4  # group_size of conf/config.yaml, for recipes that do not name one
TUNED = re.compile(r"tuned(?: at N = (\d+))?")


class Recipe(NamedTuple):
    """One recipe of the study.

    fixed: key -> value of every run. axes: key -> values; each combination is a run. measured: keys of
    experiments/variance.py where policies are measured, else None.
    """

    name: str
    why: str
    fixed: dict[str, Any]
    axes: dict[str, list]
    measured: dict[str, Any] | None

    @property
    def count(self) -> int:
        """Returns the number of runs, 0 where nothing is trained."""
        return len(combinations(self.axes)) if self.axes else 0

    @property
    def is_real(self) -> bool:
        """Tells whether the recipe is about the real language model."""
        return "model" in self.fixed


@cache
def recipes(file: Path = FILE) -> dict[str, Recipe]:
    """Returns name -> recipe, in the order in which they are run."""
    return {name: recipe_of(name, keys) for name, keys in yaml.safe_load(file.read_text(encoding="utf8")).items()}


def recipe_of(name: str, keys: dict[str, Any]) -> Recipe:
    """Returns one recipe of the file."""
    values = {key: value for key, value in keys.items() if key not in ("why", "measured")}
    axes = {key: value for key, value in values.items() if isinstance(value, list)}
    fixed = {key: value for key, value in values.items() if key not in axes}
    return Recipe(name, keys["why"], fixed, axes, keys.get("measured"))


def named(names: Iterable[str]) -> list[Recipe]:
    """Returns the recipes of these names. Raises RunError for a name that is none."""
    known = recipes()
    for name in names:
        if name not in known:
            raise RunError(f"{name} is no recipe of the study. Known: {', '.join(known)}.")
    return [known[name] for name in names]


def combinations(axes: Mapping[str, list]) -> list[dict[str, Any]]:
    """Returns every combination of the values of some axes."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def runs_of(recipe: Recipe, seeds: int | None = None, arms: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns the keys of each run, seed by seed, so that what is there at any moment is balanced.

    seeds: of each arm, the first so many, or None for all. arms: baselines of a swept axis, or None for all.
    Raises RunError where the learning rate of an arm has not been searched for.
    """
    (seed,) = [axis for axis in recipe.axes if axis.endswith("seed")]
    axes = recipe.axes | {seed: sorted(recipe.axes[seed])[:seeds]}
    if arms is not None and "baseline" in axes:
        axes["baseline"] = [arm for arm in axes["baseline"] if arm in arms]
    return [with_rate(recipe.fixed | run) for run in sorted(combinations(axes), key=lambda run: run[seed])]


def with_rate(run: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a run with its tuned learning rate as a number. Raises RunError where there is none yet."""
    if (found := TUNED.fullmatch(str(run.get("learning_rate")))) is None:
        return run
    size = int(found[1] or run.get("group_size", DEFAULT_SIZE))
    return run | {"learning_rate": tuned_rate(run["task"], run["baseline"], size)}


def typed(run: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a run as overrides: {"seed": 0} -> ["seed=0"]."""
    return [f"{key}={value}" for key, value in run.items()]


def varied_by(recipe: Recipe, run: Mapping[str, Any]) -> str:
    """Returns what a recipe varies beside the columns that every row has, as typed: "improvement=pipo"."""
    return " ".join(typed({key: run[key] for key in recipe.axes if key not in CONFIGURED}))
