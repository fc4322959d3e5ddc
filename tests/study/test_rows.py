"""Rows of the study: which run each is of, its curves, and the learning rates that are chosen from them."""

import shutil

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from otb.errors import RunError
from otb.records.config_keys import WHERE_AND_HOW
from study import collected as rows
from study import rates
from tests.support.study_rows import RUNS, a_run, made_up


def test_a_run_directory_has_the_key_of_the_configuration_that_it_was_made_from():
    run = a_run()
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert rows.row_of(run)["key"] == rows.key_of(config)


def test_the_key_changes_with_what_is_computed_and_not_with_where():
    config = OmegaConf.to_container(OmegaConf.load(a_run() / "config.yaml"))
    where = [name for name in WHERE_AND_HOW if name in config and name != "steps"]
    assert len(where) >= 4
    assert rows.key_of(config | dict.fromkeys(where, "elsewhere")) == rows.key_of(config)
    for name in ("seed", "steps", "learning_rate", "group_size"):
        assert rows.key_of(config | {name: 77}) != rows.key_of(config)


def test_a_row_gives_back_the_curves_of_its_run(tmp_path):
    run = a_run()
    rows.add([rows.row_of(run)], tmp_path / "rows.csv")
    table = rows.steps_table(rows.read(tmp_path / "rows.csv"))
    evaluations = pd.read_json(run / "evaluations.jsonl", lines=True)
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    evaluated = table[table.evaluation_accuracy.notna()]
    np.testing.assert_allclose(evaluated.evaluation_accuracy, evaluations.accuracy, rtol=1e-4)
    np.testing.assert_allclose(table.gradient_norm.dropna(), metrics.gradient_norm, rtol=1e-4)
    assert table.step.tolist() == sorted({0, *metrics.step})


def test_what_a_method_did_stands_in_the_rows_of_runs_that_had_it(tmp_path):
    run, file = tmp_path / "run", tmp_path / "rows.csv"
    shutil.copytree(a_run(), run)
    steps = pd.read_json(run / "metrics.jsonl", lines=True)
    steps["token_weight_support"] = np.linspace(0.5, 1, len(steps))
    steps.to_json(run / "metrics.jsonl", orient="records", lines=True)
    rows.add([rows.row_of(a_run())], file)
    rows.add([rows.row_of(run) | {"key": "of a method"}], file)
    cells = dict(zip(rows.read(file).key, rows.read(file).token_weight_support, strict=True))
    np.testing.assert_allclose(rows.numbers(cells.pop("of a method")), steps.token_weight_support, rtol=1e-4)
    assert list(cells.values()) == [""]


def test_rows_are_added_once_whatever_is_added_again(tmp_path):
    file = tmp_path / "rows.csv"
    assert rows.add([made_up(seed=1), made_up(seed=0)], file) == 2
    before = file.read_bytes()
    assert rows.add([made_up(seed=1, final=0.1)], file) == 0 and file.read_bytes() == before
    assert rows.add([made_up(seed=2)], file) == 1
    assert rows.read(file).seed.tolist() == [0, 1, 2]


def test_only_runs_that_are_asked_for_are_collected(tmp_path):
    wanted = rows.row_of(a_run())["key"]
    assert rows.collect(RUNS, {wanted: ""}, tmp_path / "rows.csv") == 1
    assert rows.keys_in(tmp_path / "rows.csv") == {wanted} and "varied" not in rows.read(tmp_path / "rows.csv")
    rows.collect(RUNS, {wanted: "improvement=pipo"}, tmp_path / "methods.csv")
    assert rows.read(tmp_path / "methods.csv").varied.tolist() == ["improvement=pipo"]


def test_runs_of_the_real_model_have_a_task_of_their_own(tmp_path):
    wanted = rows.row_of(a_run())["key"]
    rows.collect(RUNS, {wanted: ""}, tmp_path / "claim_c3_c4_real.csv")
    assert rows.read(tmp_path / "claim_c3_c4_real.csv").task.tolist() == [rows.REAL]


# ---- learning rates


def search(scores: dict[float, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [made_up(rate=rate, final=final, seed=seed) for rate, final in scores.items() for seed in (100, 101)]
    )


def test_the_rate_with_the_highest_mean_accuracy_is_chosen_and_of_equal_ones_the_smaller():
    best = rates.chosen(rates.scores(search({3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.5})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[1e-3, False]]
    best = rates.chosen(rates.scores(search({1e-4: 0.6, 3e-4: 0.8, 1e-3: 0.8005, 3e-3: 0.5})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[3e-4, False]]


def test_an_arm_gets_no_rate_before_both_seeds_have_run_and_the_next_one_where_the_best_is_an_end_of_the_list():
    tried = {3e-4: 0.8, 1e-3: 0.7, 3e-3: 0.5}
    assert rates.chosen(rates.scores(search(tried))).empty
    best = rates.chosen(rates.scores(search(tried | {1e-4: 0.85})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[1e-4, True]]  # the next one was tried, once
    middle = search({3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.5})
    assert len(rates.chosen(rates.scores(middle))) == 1
    assert rates.chosen(rates.scores(middle[(middle.seed == 100) | (middle.learning_rate < 3e-3)])).empty


def test_a_diverged_run_keeps_its_last_accuracy_to_the_end():
    made = search({1e-3: 0.8, 3e-3: 0.8})
    made.loc[made.learning_rate == 3e-3, ["evaluation_accuracy", "outcome"]] = ["0.4", "diverged"]
    assert list(rates.scores(made).score) == pytest.approx([0.7, 0.4])


def test_rates_are_found_again_and_one_that_is_missing_names_its_search(tmp_path):
    begun = [
        made_up("rloo", rate=rate, seed=seed) for rate in (3e-4, 1e-3) for seed in (100, 101)
    ]  # a search that is not done
    rows.add([*search({3e-4: 0.8, 1e-3: 0.9, 3e-3: 0.5}).to_dict("records"), *begun], tmp_path / "rows.csv")
    rates.write_rates([tmp_path / "rows.csv"], tmp_path / "rates.yaml")
    assert rates.tuned_rate("arithmetic", "otb", 4, tmp_path / "rates.yaml") == 1e-3
    with pytest.raises(RunError, match="no learning rate for task=arithmetic baseline=rloo group_size=4"):
        rates.tuned_rate("arithmetic", "rloo", 4, tmp_path / "rates.yaml")
    with pytest.raises(RunError, match="no learning rate for task=arithmetic baseline=otb group_size=32"):
        rates.tuned_rate("arithmetic", "otb", 32, tmp_path / "rates.yaml")
