"""Runs what no committed row of the study covers yet: the recipes claim_* and neighbours_* of conf/experiment.

python study/run.py                         # every recipe, on all cores
python study/run.py claim_rates --seeds 2   # one recipe, the first two of its seeds
python study/run.py --quick --rows build/study/rows   # every claim with few seeds: half an hour
Each run that ends adds its row to study/rows/RECIPE.csv at once; a killed run goes on where it was. On a cluster:
`python experiments/run.py -m experiment=claim_... hydra/launcher=slurm runs_dir=RUNS`, then `--collect RUNS` here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.checks import check_learning_rate
from experiments.running.command_line import CONF, exit_codes
from experiments.sweeps.jobs import save_jobs
from experiments.sweeps.local import LocalSweep, check_parallel
from experiments.sweeps.runs_of import Composer, folder_of, plan
from hydra_plugins.otb_launchers import Sweeper
from otb.errors import RunError
from study import collected as rows
from study.measure import measure, measure_real, policies, warm_start_real
from study.rates import SEARCH, write_rates

ROWS = CONF.parent / "study" / "rows"
RUNS = "runs/study"
RESTARTS = 3  # of a run that is killed, in a row without a new checkpoint
MEASURED = ("claim_c1", "claim_c1_tools", "claim_c1_long")  # whose rows are measurements of policies, not runs
MEASURED_REAL, TRAINED_REAL = "claim_c1_real", "claim_c3_c4_real"  # both start from one supervised pass
# Seeds of the quick form, half an hour on two cores: an interval takes three. Its arms are those that verdicts compare.
QUICK = {"claim_c3_c4": 3, "claim_c3_c4_32": 3, "claim_c1": 1, "claim_c2": 3}
QUICK_ARMS = ("otb", "rloo")
RECIPES = (  # in the order in which they are run
    *("claim_rates", "claim_rates_low", "claim_c3_c4", "claim_rates_32", "claim_c3_c4_32"),
    *("claim_c1", "claim_fixed_rollouts"),
    *("claim_c2", "claim_c2_between", "claim_c2_cosine", "claim_c2_sgd", "claim_c2_sgd_16", "claim_c2_updates"),
    *("claim_rates_tools", "claim_rates_tools_low", "claim_c3_c4_tools"),
    *("claim_rates_tools_32", "claim_c3_c4_tools_32", "claim_c1_tools"),
    *("claim_rates_long", "claim_rates_long_low", "claim_c3_c4_long"),
    *("claim_rates_long_32", "claim_rates_long_32_low", "claim_c3_c4_long_32", "claim_c1_long"),
    *("neighbours_improvement", "neighbours_auxiliary", "neighbours_token_weights", "neighbours_schedule"),
    *("neighbours_plateau", "neighbours_schedule_cosine", "neighbours_schedule_tools"),
    *(MEASURED_REAL, TRAINED_REAL),
)


def study(
    recipes: Mapping[str, int | None],
    parallel: int | None,
    made: Path | None,
    folder: Path,
    real_model: Sequence[str] = (),
    arms: Sequence[str] | None = None,
) -> None:
    """Runs what the rows in `folder` lack of each recipe. Raises RunError.

    recipes: name -> seeds of each arm, the first so many, or None for all. arms: baselines, or None for all.
    made: a folder of runs whose rows are added; nothing is run. real_model: overrides that say where the real model's
    weights are, if not on the hub.
    """
    check_parallel(parallel)
    for recipe, seeds in recipes.items():
        file = folder / f"{recipe}.csv"
        if recipe in MEASURED:
            with composing(recipe) as (_, sweep):
                asked_for = policies(sweep.hydra.runtime.choices.task, runs_of(sweep, recipe, None)[:seeds])
            if made is None:
                measure(recipe, asked_for, sweep.steps, parallel, file, Path(RUNS))
            continue
        if recipe == MEASURED_REAL:
            if made is None:
                measure_real(list(real_model), parallel, file, Path(RUNS))
            continue
        keys = keys_of(recipe, seeds, arms)
        asked = {key: varied_by(run) for key, run in keys.items()}
        if not keys.keys() <= rows.keys_in(file):  # a killed command may have left runs without a row
            rows.collect(made or Path(RUNS), asked, file)
        missing = [run for key, run in keys.items() if key not in rows.keys_in(file)]
        print(f"{recipe}: {len(keys)} runs, {len(keys) - len(missing)} of them have a row", flush=True)
        if made is None and missing and recipe == TRAINED_REAL:
            warm_start_real(list(real_model), Path(RUNS))
        if made is None and missing:
            run(recipe, missing, parallel, partial(rows.collect, asked=asked, file=file))
        searched = recipe.startswith(SEARCH) and seeds is None and arms is None and keys.keys() <= rows.keys_in(file)
        if searched and folder == ROWS:  # the recipes that follow read their rates from it
            write_rates(sorted(folder.glob(f"{SEARCH}*.csv")))


def keys_of(recipe: str, seeds: int | None, arms: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Returns key -> overrides of the runs of a recipe, seed by seed: what is there at any moment is balanced.

    Raises RunError where the learning rate of an arm has not been searched for.
    """
    with composing(recipe) as (loader, sweep):
        composer = Composer(loader, sweep)
        keys = {}
        for run in runs_of(sweep, recipe, seeds, arms):
            cfg = composer.compose(run)
            check_learning_rate(cfg)
            keys[rows.key_of(OmegaConf.to_container(cfg, resolve=True))] = run
        return keys


def varied_by(run: list[str]) -> str:
    """Returns what a recipe varies beside the columns that every row has, in the words of the command line."""
    names = ("experiment", "runs_dir", *rows.CONFIGURED)
    return " ".join(override for override in run if override.partition("=")[0] not in names)


def run(recipe: str, missing: list[list[str]], parallel: int | None, keep_row: Callable[[Path], object]) -> None:
    """Runs what is missing of a recipe. keep_row: called with the folder of each run that ends."""
    with composing(recipe) as (loader, sweep):
        jobs = plan(loader, sweep, missing, processes=1, here=True)
        folder = new_folder_of(sweep)
        save_jobs(folder, jobs)
        LocalSweep(folder, jobs, parallel, RESTARTS, overwrite=False, ended=lambda job: keep_row(Path(job.run))).run()


@contextmanager
def composing(recipe: str) -> Iterator[tuple[ConfigLoader, DictConfig]]:
    """Yields Hydra's loader and the configuration of a recipe's sweep."""
    own = [f"experiment={recipe}", f"runs_dir={RUNS}", f"hydra.sweep.dir={RUNS}/sweep-{recipe}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader, loader.load_configuration("config", own, RunMode.MULTIRUN)


def new_folder_of(sweep: DictConfig) -> Path:
    """Returns the folder of a sweep without the job files of an earlier start, which missed other runs."""
    folder = folder_of(sweep)
    for file in folder.glob("job-*.json"):
        file.unlink()
    return folder


def runs_of(sweep: DictConfig, recipe: str, seeds: int | None, arms: Sequence[str] | None = None) -> list[list[str]]:
    """Returns the overrides of each run of a recipe, seed by seed. arms: baselines of a swept axis, or None for all."""
    params = OmegaConf.to_container(sweep.hydra.sweeper.params)
    overrides = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    (batch,) = Sweeper.split_arguments(overrides, None)

    def seed_of(run: list[str]) -> int:
        return next(int(override.partition("=")[2]) for override in run if override.split("=")[0].endswith("seed"))

    of_seeds = sorted({seed_of(run) for run in batch})[:seeds]
    chosen = [run for run in batch if seed_of(run) in of_seeds and (arms is None or of_arms(run, arms))]
    return [[f"experiment={recipe}", f"runs_dir={RUNS}", *run] for run in sorted(chosen, key=seed_of)]


def of_arms(run: list[str], arms: Sequence[str]) -> bool:
    """Returns whether a run's baseline, where its recipe sweeps it, is one of `arms`."""
    return all(override.partition("=")[2] in arms for override in run if override.startswith("baseline="))


def command_line(arguments: list[str]) -> None:
    """Runs `python study/run.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    parser = argparse.ArgumentParser(prog="python study/run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; none: all")
    parser.add_argument("--seeds", type=int, help="of each arm the first so many alone: wide intervals, soon")
    parser.add_argument("--quick", action="store_true", help="what the verdicts compare, with one or three seeds")
    parser.add_argument("--parallel", type=int, help="runs at a time; by default one per core")
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="add the rows of these runs; run nothing")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the csv files")
    parser.add_argument(
        "--real-model",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="where the weights of claim_*_real are, if not on the hub: model.name=FOLDER model.gguf_file=NAME",
    )
    options = parser.parse_args(arguments)
    with exit_codes(after_stop="goes on with what has no row yet"):
        if options.quick and (options.recipes or options.seeds):
            raise RunError("--quick chooses recipes and seeds itself. Leave it out, or leave out the others.")
        if options.seeds is not None and options.seeds < 1:
            raise RunError(f"--seeds {options.seeds} must be at least 1. Leave it out for all seeds.")
        if options.collect is not None and not options.collect.is_dir():
            raise RunError(f"--collect {options.collect} is no folder. Give the one that the runs are in.")
        for recipe in options.recipes:
            if options.collect is not None and recipe in (*MEASURED, MEASURED_REAL):
                raise RunError(f"--collect has no rows of {recipe}: they are measured, not collected from runs.")
            if recipe not in RECIPES:
                raise RunError(f"{recipe} is no recipe of the study. Known: {', '.join(RECIPES)}.")
        asked = QUICK if options.quick else dict.fromkeys(options.recipes or RECIPES, options.seeds)
        arms = QUICK_ARMS if options.quick else None
        study(asked, options.parallel, options.collect, options.rows, options.real_model, arms)


if __name__ == "__main__":
    command_line(sys.argv[1:])
