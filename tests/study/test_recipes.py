"""Recipes and the command of the study: their keys are those of the committed rows, and nothing is run twice."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.running.command_line import CONF
from otb.errors import RunError
from study import collected, measure, moments, neighbours, rates, run, verdicts
from study.__main__ import command_line
from study.recipes import recipes, runs_of, typed, varied_by
from tests.support.commands import ROOT
from tests.support.study_rows import made_up

RUNS_OF = {name: recipe for name, recipe in recipes().items() if recipe.measured is None}
NOT_RUN = "claim_c2_updates"


@pytest.mark.parametrize("name", RUNS_OF)
def test_the_rows_of_a_recipe_are_of_its_runs_and_of_no_other(name):
    """Nothing was run by hand, no seed was replaced, and a change of the table or of conf/ would make other runs."""
    asked, file = run.keys_of(RUNS_OF[name]), run.ROWS / f"{name}.csv"
    assert len(asked) == RUNS_OF[name].count
    assert collected.keys_in(file) == (set() if name == NOT_RUN else set(asked))
    if file.exists():
        varied = dict(zip(collected.read(file).key, collected.read(file).get("varied", [""] * len(asked)), strict=True))
        assert varied == {key: varied_by(RUNS_OF[name], values) for key, values in asked.items()}


def test_every_committed_measurement_is_of_a_policy_that_its_recipe_asks_for():
    for name, recipe in recipes().items():
        if recipe.measured is not None:
            asked = measure.policies(recipe, runs_of(recipe)) if recipe.axes else [(collected.REAL, 0, "start")]
            assert moments.measured(run.ROWS / f"{name}.csv") == set(asked)


def test_every_file_of_rows_has_a_recipe_and_none_is_left_in_conf():
    assert {file.stem for file in run.ROWS.glob("*.csv")} == recipes().keys() - {NOT_RUN}
    assert not [path for path in (CONF / "experiment").glob("*.yaml") if path.stem.startswith(("claim", "neighbours"))]
    assert yaml.safe_load(rates.RATES.read_text())


def test_a_recipe_says_why_and_is_written_in_keys_of_the_command_line():
    for recipe in recipes().values():
        assert recipe.why and recipe.why.endswith(".")
    (first, *_) = runs_of(recipes()["claim_c1_tools"])
    assert typed(first) == [
        *("task=arithmetic_tools", "baseline=rloo", "learning_rate=0.0003", "steps=80", "evaluation.every=40"),
        *("checkpoint_every=40", "+model.warm_start.seed=1"),
    ]
    assert measure.measured_with(recipes()["claim_c1_long"])[0] == "prompts=8"


def test_a_run_starts_without_the_study():
    """It composes, is checked and builds its task, as experiments/run.py does before it loads a model."""
    code = """
import sys
import experiments.run
from hydra import compose, initialize_config_dir
from experiments.checks import check
from experiments.running.command_line import CONF
with initialize_config_dir(str(CONF), version_base="1.3"):
    check(compose("config", ["task=arithmetic_long", "group_size=32"]))
import experiments.running.train
print([name for name in sys.modules if name.split(".")[0] == "study"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- the command


def test_the_command_runs_what_has_no_row_seed_by_seed_and_skips_the_rest(tmp_path, monkeypatch, capsys):
    started: list = []

    class Sweep:
        def __init__(self, folder, jobs, *args, **kwargs):
            started.extend(jobs)

        def run(self):
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "LocalSweep", Sweep)
    keys = run.keys_of(recipes()["claim_rates"], seeds=1)
    known = {"key": list(keys)[0], **{name: value for name, value in made_up().items() if name != "key"}}
    collected.add([known], tmp_path / "rows" / "claim_rates.csv")
    run.study({"claim_rates": 1}, parallel=None, made=None, folder=tmp_path / "rows")
    assert len(started) == len(keys) - 1 == 23
    assert f"claim_rates: {len(keys)} runs, 1 of them have a row" in capsys.readouterr().out
    assert all("seed=100" in job.overrides for job in started)


def test_a_cluster_gets_what_has_no_row_and_the_same_command_adds_the_rows(tmp_path, monkeypatch, capsys):
    sent: list = []

    def launch(loader, sweep, overrides, options):
        sent.append((sweep.hydra.sweep.dir, list(overrides), options["partition"]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slurm.submit.launch", launch)
    given = ["claim_rates", "--seeds", "1", "--rows", str(tmp_path / "rows"), f"runs_dir={tmp_path}/runs"]
    command_line([*given, "hydra/launcher=slurm", "hydra.launcher.partition=cpu", "hydra.launcher.wait=false"])
    ((folder, overrides, partition),) = sent
    assert Path(folder).parent == tmp_path / "runs" and partition == "cpu"
    assert len(overrides) == 24 and overrides[0][:3] == ["task=arithmetic", "group_size=4", "evaluation.every=10"]
    assert "24 runs, 0 of them have a row" in capsys.readouterr().out


def test_a_recipe_whose_rates_were_not_searched_for_is_refused_with_the_search_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(rates.tuned_rate, "__defaults__", (tmp_path / "none.yaml",))
    text = "no learning rate for task=arithmetic baseline=none group_size=4. Run its search"
    with pytest.raises(RunError, match=text):
        run.keys_of(recipes()["claim_c3_c4"], seeds=1)


def test_the_quick_form_runs_the_arms_that_verdicts_compare_with_the_seeds_that_an_interval_takes():
    assert run.QUICK_ARMS == (verdicts.OURS, verdicts.RIVAL)
    asked = {name: runs_of(recipes()[name], seeds, run.QUICK_ARMS) for name, seeds in run.QUICK.items()}
    assert [len(runs) for runs in asked.values()] == [6, 3, 1, 36]
    for name in ("claim_c3_c4", "claim_c3_c4_32", "claim_c2"):
        assert {one["seed"] for one in asked[name]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claim_c2", "--seeds", "-1"], "--seeds -1 must be at least 1"),
        (["claim_c2", "--quick"], "--quick chooses recipes and seeds itself"),
        (["claim_c2", "--collect", "/nowhere"], "--collect /nowhere is no folder"),
        (["claim_c1", "--collect", "."], "--collect has no rows of claim_c1"),
        (["claim_c1", "hydra/launcher=slurm"], "claim_c1 is measured by this process"),
        (["claim_c9"], "claim_c9 is no recipe of the study"),
        (["claim_c2", "learning_rate=1"], "learning_rate=1 would make other runs"),
        (["report", "claim_c2"], "report takes no other words"),
    ],
)
def test_what_the_command_cannot_do_as_typed_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        command_line(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_what_a_recipe_varies_beside_the_usual_columns_is_kept_with_its_runs():
    first = runs_of(recipes()["neighbours_improvement"])[0]
    assert varied_by(recipes()["neighbours_improvement"], first) == "improvement=none"
    for name, question in neighbours.QUESTIONS.items():
        assert question.off in {varied_by(recipes()[name], values) for values in runs_of(recipes()[name], 1)}
