"""Runs the study and writes its pages.

python -m study                              # every recipe of study/recipes.yaml that lacks rows, on all cores
python -m study claim_rates --seeds 2        # one recipe, the first two of its seeds
python -m study --quick --rows build/study/rows   # every claim with few seeds, in half an hour
python -m study claim_c3_c4 hydra/launcher=slurm runs_dir=RUNS   # on a cluster; give it again to add the rows
python -m study report                       # the pages, from the rows
python -m study rates                        # study/rates.yaml, from the rows of the search
A run adds its row to study/rows/RECIPE.csv when it ends. The same command skips what has a row and resumes the rest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.running.command_line import exit_codes
from otb.errors import RunError
from otb.records.config_keys import WHERE_AND_HOW, is_one_of
from study.recipes import named, recipes
from study.run import QUICK, QUICK_ARMS, ROWS, study

STUDY = Path(__file__).resolve().parent


def command_line(arguments: list[str]) -> None:
    """Runs `python -m study ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    with exit_codes(after_stop="goes on with what has no row yet"):
        options = parsed(arguments)
        if options.words[:1] in (["report"], ["rates"]):
            write_pages(options.words, options.folder)
        else:
            run(options)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Returns what was typed. Words with = in them are overrides, the others recipes."""
    parser = argparse.ArgumentParser(
        prog="python -m study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"report, rates, or recipes: {', '.join(recipes())}; none: all. KEY=VALUE: where and how runs are made"
    parser.add_argument("words", nargs="*", metavar="RECIPE", help=known)
    parser.add_argument("--seeds", type=int, help="run only the first so many seeds of each arm")
    parser.add_argument("--quick", action="store_true", help="what the verdicts compare, with one or three seeds")
    parser.add_argument("--parallel", type=int, help="runs at a time; by default one per core")
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="add the rows of these runs and run nothing")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the csv files")
    parser.add_argument("--folder", type=Path, default=STUDY, help="report and rates: holds rows/, takes the pages")
    where = "where the weights of claim_*_real are, if not on the hub: model.name=FOLDER model.gguf_file=NAME"
    parser.add_argument("--real-model", nargs="+", default=[], metavar="KEY=VALUE", help=where)
    return parser.parse_intermixed_args(arguments)


def write_pages(words: list[str], folder: Path) -> None:
    """Writes the pages, or the chosen rates, and prints what was written. Raises RunError."""
    from study.pages import write  # matplotlib: so only now
    from study.rates import SEARCH, write_rates

    if len(words) > 1:
        raise RunError(f"{words[0]} takes no other words, and {words[1]} was given. Leave it out.")
    if words == ["report"]:
        print("\n".join(map(str, write(folder))))
        return
    files = sorted((folder / "rows").glob(f"{SEARCH}*.csv"))
    if not files:
        raise RunError(f"{folder}/rows holds no {SEARCH}*.csv. Run the search first.")
    print(write_rates(files).to_string(index=False))


def run(options: argparse.Namespace) -> None:
    """Runs what has no row. Raises RunError for what cannot be done as typed."""
    names = [word for word in options.words if "=" not in word]
    launch = [word for word in options.words if "=" in word]
    chosen = named(names)
    if options.quick and (names or options.seeds is not None):
        raise RunError("--quick chooses recipes and seeds itself. Leave it out, or leave out the others.")
    if options.seeds is not None and options.seeds < 1:
        raise RunError(f"--seeds {options.seeds} must be at least 1. Leave it out for all seeds.")
    if options.collect is not None and not options.collect.is_dir():
        raise RunError(f"--collect {options.collect} is no folder. Give the one that the runs are in.")
    measured = [recipe.name for recipe in chosen if recipe.measured is not None]
    if options.collect is not None and measured:
        raise RunError(f"--collect has no rows of {measured[0]}: they are measured, not collected from runs.")
    if measured and any(word.startswith("hydra/launcher=") for word in launch):
        raise RunError(f"{measured[0]} is measured by this process and not sent. Leave out hydra/launcher.")
    for word in launch:
        key = word.lstrip("+").partition("=")[0]
        if not (key.startswith("hydra") or (is_one_of(key, WHERE_AND_HOW) and key != "steps")):
            raise RunError(f"{word} would make other runs than the study's. Use experiments/run.py for them.")
    asked = QUICK if options.quick else dict.fromkeys(names or recipes(), options.seeds)
    arms = QUICK_ARMS if options.quick else None
    study(asked, options.parallel, options.collect, options.rows, options.real_model, arms, launch)


if __name__ == "__main__":
    command_line(sys.argv[1:])
