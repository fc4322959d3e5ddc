"""Runs what no committed row of the study covers yet: the recipes of study/recipes.yaml. `python -m study` calls it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks  # private: a launcher takes a context, which takes callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.running.command_line import CONF, accept_open_keys
from experiments.sweeps.jobs import save_jobs
from experiments.sweeps.local import LocalSweep, check_parallel
from experiments.sweeps.runs_of import Composer, folder_of, plan
from study import collected as rows
from study.measure import measure, measure_real, warm_start_real
from study.rates import SEARCH, write_rates
from study.recipes import Recipe, named, runs_of, typed, varied_by

ROWS = CONF.parent / "study" / "rows"
RUNS = "runs/study"
RESTARTS = 3  # of a run that is killed, in a row without a new checkpoint
# The quick form takes half an hour on two cores: three seeds are the fewest that give an interval.
QUICK = {"claim_c3_c4": 3, "claim_c3_c4_32": 3, "claim_c1": 1, "claim_c2": 3}
QUICK_ARMS = ("otb", "rloo")


def study(
    recipes: Mapping[str, int | None],
    parallel: int | None,
    made: Path | None,
    folder: Path,
    real_model: Sequence[str] = (),
    arms: Sequence[str] | None = None,
    launch: Sequence[str] = (),
) -> None:
    """Runs what the rows in `folder` lack of each recipe. Raises RunError.

    recipes: name -> seeds of each arm, the first so many, or None for all. arms: baselines, or None for all.
    made: a folder of runs whose rows are added; nothing is run. real_model: overrides that say where the real model's
    weights are, if not on the hub. launch: overrides that say where and how runs are made.
    """
    check_parallel(parallel)
    runs_dir = Path(next((text.partition("=")[2] for text in launch if text.startswith("runs_dir=")), RUNS))
    for recipe, seeds in zip(named(recipes), recipes.values(), strict=True):
        file = folder / f"{recipe.name}.csv"
        if recipe.measured is not None:
            if made is None and recipe.is_real:
                measure_real(recipe, list(real_model), parallel, file, runs_dir)
            elif made is None:
                measure(recipe, runs_of(recipe, seeds), parallel, file, runs_dir)
            continue
        asked = keys_of(recipe, seeds, arms)
        words = {key: varied_by(recipe, run) for key, run in asked.items()}
        if not asked.keys() <= rows.keys_in(file):  # a killed command may have left runs without a row
            rows.collect(made or runs_dir, words, file)
        missing = [run for key, run in asked.items() if key not in rows.keys_in(file)]
        print(f"{recipe.name}: {len(asked)} runs, {len(asked) - len(missing)} of them have a row", flush=True)
        if made is None and missing:
            if recipe.is_real:
                warm_start_real(recipe, list(real_model), runs_dir)
            run_missing(recipe, missing, parallel, launch, partial(rows.collect, asked=words, file=file))
        searched = recipe.name.startswith(SEARCH) and seeds is None and arms is None
        if searched and folder == ROWS and asked.keys() <= rows.keys_in(file):  # later recipes read their rates from it
            write_rates(sorted(folder.glob(f"{SEARCH}*.csv")))


def keys_of(recipe: Recipe, seeds: int | None = None, arms: Sequence[str] | None = None) -> dict[str, dict]:
    """Returns key -> run, the first seed of all arms first. seeds, arms: as in `runs_of`.

    Raises RunError where the learning rate of an arm has not been searched for.
    """
    with composing(recipe.name) as (loader, sweep):
        composer = Composer(loader, sweep)
        keys = {}
        for run in runs_of(recipe, seeds, arms):
            cfg = composer.compose(accept_open_keys(typed(run)))
            keys[rows.key_of(OmegaConf.to_container(cfg, resolve=True))] = run
        return keys


def run_missing(
    recipe: Recipe, missing: list[dict], parallel: int | None, launch: Sequence[str], keep_row: Callable[[Path], object]
) -> None:
    """Runs what is missing of a recipe, here or where the launcher that `launch` names sends it.

    keep_row: called with the folder of each run that ends, or of all of them.
    """
    overrides = [accept_open_keys(typed(run)) for run in missing]
    if not any(text.startswith("hydra/launcher=") for text in launch):
        with composing(recipe.name, launch) as (loader, sweep):
            jobs = plan(loader, sweep, overrides, processes=1, here=True)
            folder = new_folder_of(sweep)
            save_jobs(folder, jobs)
            sweeping = LocalSweep(
                folder, jobs, parallel, RESTARTS, overwrite=False, ended=lambda job: keep_row(Path(job.run))
            )
            sweeping.run()
        return
    # The number of a job means one run, so another set of missing runs needs another folder.
    digest = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]
    with composing(f"{recipe.name}-{digest}", launch) as (loader, sweep):
        launcher = instantiate(sweep.hydra.launcher, _convert_="object")
        launcher.setup(hydra_context=HydraContext(loader, Callbacks()), task_function=None, config=sweep)
        launcher.launch(overrides, initial_job_idx=0)
        keep_row(Path(sweep.runs_dir))


@contextmanager
def composing(name: str, launch: Sequence[str] = ()) -> Iterator[tuple[ConfigLoader, DictConfig]]:
    """Yields Hydra's loader and the configuration of a sweep. name: of its folder, sweep-NAME."""
    own = [] if any(text.startswith("runs_dir=") for text in launch) else [f"runs_dir={RUNS}"]
    own += [f"hydra.sweep.dir=${{runs_dir}}/sweep-{name}", *launch]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader, loader.load_configuration("config", own, RunMode.MULTIRUN)


def new_folder_of(sweep: DictConfig) -> Path:
    """Returns the folder of a sweep without the job files of an earlier start, which missed other runs."""
    folder = folder_of(sweep)
    for file in folder.glob("job-*.json"):
        file.unlink()
    return folder
