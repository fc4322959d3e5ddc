"""Tests `python experiments/forecast.py`: what it prints and keeps, that it samples nothing twice, its refusals."""

import shutil

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

from experiments.forecast import checked_estimators
from experiments.measuring.forecast_table import OFF, Facts, advice
from experiments.measuring.forecasting import read_kept, scored_rollouts
from otb.errors import RunError
from otb.laboratory.estimators import Prompt
from otb.laboratory.sampling import Sampler
from otb.laboratory.scores import measure
from otb.records import RunDirectory
from tests.support import commands
from tests.support.parity_task import Parity
from tests.support.recipes import composed

TASK = {
    "task._target_": "tests.support.parity_task.Parity",
    "task.train_prompts": 10,
    "task.eval_prompts": 4,
    "task.max_completion_length": 6,
}
SMALL = TASK | {"prompts": 3, "rollouts": 16, "group_sizes": "[2,4]", "partitions": 4, "prompts_per_step": 4}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


def given(policy, runs_dir, **changed) -> list[str]:
    values = SMALL | {"model.name": policy, "runs_dir": runs_dir}
    values |= {key.replace("__", "."): value for key, value in changed.items()}
    return [f"{key}={value}" for key, value in values.items()]


def the_folder(runs_dir):
    (config,) = (runs_dir / "forecast").glob("*/config.yaml")
    return config.parent


@pytest.fixture(scope="module")
def sampled(policy, tmp_path_factory, log):
    """Returns the folder of a forecast, and the command's output."""
    runs_dir = tmp_path_factory.mktemp("sampled")
    printed = commands.done(given(policy, runs_dir), log, script="forecast")
    return the_folder(runs_dir), printed


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory, log):
    """Returns the directory of a run of two steps that kept the rollouts of both."""
    runs_dir = tmp_path_factory.mktemp("run")
    changed = {"group_size": 4, "steps": 2, "rollouts__every": 1, "rollouts__groups": 4}
    commands.done(commands.arguments(runs_dir, model__name=policy, **changed), log)
    return commands.the_run(runs_dir)


def test_forecast_keeps_rollouts_and_table_and_ends_with_one_sentence(sampled):
    folder, printed = sampled
    assert folder.name.startswith("arithmetic-tiny-") and str(folder) in printed
    names = {f"prompt-000{i}-16.parquet" for i in range(3)}
    assert {path.name for path in (folder / "rollouts").iterdir()} == names
    table = pd.read_csv(folder / "forecast.csv")
    estimators = set(checked_estimators(composed(command="forecast")))
    assert set(table.estimator) == estimators and set(table.group_size) == {2, 4} and len(table) == 2 * len(estimators)
    assert (table[table.estimator == "rloo"].forecast == 1).all() and table.forecast.notna().all()
    assert all(f" {name} " in printed for name in estimators)
    for part in ("N = 2: forecast", "N = 4: forecast", "3 prompts", "headroom, cross-fitted", "correlation of W_T"):
        assert part in printed
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("At N = 2 ") and last.endswith("does not see the bias of a direction.")
    assert "rests on only" in last and "was off by up to" in last


def test_score_norms_are_those_that_the_laboratory_measures(policy, tokenizer, tmp_path):
    task = Parity(train_prompts=4, eval_prompts=2, max_completion_length=6)
    model = AutoModelForCausalLM.from_pretrained(policy)
    sampler = Sampler(model, tokenizer, task, None, 0.8, str(tmp_path), per_device_train_batch_size=3)
    rows = list(task.train_dataset())[:2]
    drawn = sampler.rollouts(rows, 4, seed=5)
    step, endings = sampler.scored(rows, 4, seed=5)
    assert step.rollouts.rewards.shape == (2, 4) and len(endings) == 8 and set(endings) <= {"end", "length"}
    for index, rollouts in enumerate(drawn):
        prompt = Prompt(measure(model, rollouts, 0.8, None))
        assert prompt.rewards.tolist() == step.rollouts.rewards[index].tolist()
        assert prompt.lengths.tolist() == step.rollouts.lengths[index].tolist()
        width = prompt.score_norms.shape[1]
        np.testing.assert_allclose(step.rollouts.score_norms[index][:, :width], prompt.score_norms, atol=1e-5)


def test_same_command_only_prints_and_other_group_sizes_sample_nothing(sampled, policy, log):
    folder, before = sampled
    times = {path.name: path.stat().st_mtime_ns for path in (folder / "rollouts").iterdir()}
    runs_dir = folder.parent.parent
    again = commands.done(given(policy, runs_dir), log, script="forecast")
    assert again == before[before.index("rollouts and forecast.csv") :]
    other = commands.done(given(policy, runs_dir, group_sizes="[8]", estimators="otb"), log, script="forecast")
    assert "sampling" not in other and "N = 8" in other and " otb " in other and "opo" not in other
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "rollouts").iterdir()} == times
    commands.done(given(policy, runs_dir), log, script="forecast")  # leaves forecast.csv as the other tests read it


def test_killed_command_resumes_and_draws_what_it_would_have_drawn(sampled, policy, tmp_path, log):
    """The first kill falls into the first prompt; a missing file is the state after a later one."""
    folder, _ = sampled
    commands.kill_at("reward 1", given(policy, tmp_path), log, tmp_path / "hold", script="forecast")
    assert not list(tmp_path.glob("forecast/*/rollouts/*.parquet"))
    commands.done(given(policy, tmp_path), log, script="forecast")
    found = the_folder(tmp_path)
    assert (found / "forecast.csv").read_bytes() == (folder / "forecast.csv").read_bytes()
    kept = (found / "rollouts" / "prompt-0000-16.parquet").stat().st_mtime_ns
    (found / "rollouts" / "prompt-0001-16.parquet").unlink()
    (found / "forecast.csv").unlink()
    assert "sampling" in commands.done(given(policy, tmp_path), log, script="forecast")
    assert (found / "forecast.csv").read_bytes() == (folder / "forecast.csv").read_bytes()
    assert (found / "rollouts" / "prompt-0000-16.parquet").stat().st_mtime_ns == kept


def test_checkpoint_of_a_run_and_adapter_are_sampled(policy, run, tmp_path, log):
    directory = RunDirectory(run)
    checkpoint = directory.checkpoint(max(directory.checkpoint_steps()))
    commands.done(given(policy, tmp_path, checkpoint=checkpoint, prompts=3, rollouts=4), log, script="forecast")
    assert the_folder(tmp_path).name.startswith("arithmetic-tiny-step-00000002-")
    arguments = commands.arguments(tmp_path / "lora", model__name=policy, model__lora__r=2, steps=2)
    commands.done(arguments, log)
    lora = RunDirectory(commands.the_run(tmp_path / "lora"))
    options = {"checkpoint": lora.checkpoint(2), "rollouts": 4}
    commands.done(given(policy, tmp_path / "of_adapter", **options), log, script="forecast")
    assert len(pd.read_csv(the_folder(tmp_path / "of_adapter") / "forecast.csv"))


# ---- rollouts that exist


def test_kept_rollouts_of_a_run_are_forecast_together_and_step_by_step(run, log):
    printed = commands.done([f"run={run}", "group_sizes=[2,4,16]"], log, script="forecast")
    assert "forecast of noise / rloo of each kept step" in printed and "N = 2: forecast" in printed
    assert "N = 4: forecast" in printed and "N = 16: forecast" not in printed
    assert "headroom: unknown" in printed and printed.rstrip().splitlines()[-1].startswith("At N = 2 ")
    one = commands.done([f"run={run}", "steps=[2]", "group_sizes=[4]"], log, script="forecast")
    assert "each kept step" not in one and "N = 4: forecast" in one


def test_score_norms_of_a_run_are_the_differences_of_its_energies(run):
    rows = read_kept(run, [2])[2]
    prompts = scored_rollouts(rows, "here")
    assert len(prompts) == rows.prompt.nunique() == 4
    first = rows[rows.prompt == 0].iloc[0]
    np.testing.assert_allclose(prompts[0].score_norms[0].cumsum(0)[: len(first.energies)], first.energies, rtol=1e-5)
    assert prompts[0].lengths[0] == len(first.energies) and prompts[0].rewards[0] == first.reward


def test_file_with_log_probs_is_read_like_one_with_energies(sampled, tmp_path, log):
    """w = 1 - 2 pi + sum pi^2; with sum pi^2 = w - 1 + 2 pi the file says the same by other columns."""
    folder, _ = sampled
    files = sorted((folder / "rollouts").glob("*-16.parquet"))
    rows = pd.concat([pd.read_parquet(file) for file in files])
    w = [np.diff(energies, prepend=0.0) for energies in rows.energies]
    squares = [np.log(norms - 1 + 2 * np.exp(log_pi)) for norms, log_pi in zip(w, rows.log_probs, strict=True)]
    rows.assign(log_sum_sq_probs=squares)[["prompt", "reward", "log_probs", "log_sum_sq_probs"]].to_parquet(
        tmp_path / "rollouts.parquet"
    )
    options = ["group_sizes=[2,4]", "partitions=4"]
    printed = commands.done([f"run={tmp_path / 'rollouts.parquet'}", *options], log, script="forecast")
    table = pd.read_csv(folder / "forecast.csv")
    best = table[table.group_size == 2].sort_values("forecast").iloc[0]
    assert f"{best.estimator}" in printed and f"{best.forecast:.2f} [" in printed


def test_what_a_run_or_file_lacks_is_named_with_what_to_log(run, tmp_path, log):
    rows = read_kept(run, [2])[2]
    for lacking, name in (("energies", "log_energy=true"), ("reward", "no reward")):
        rows.drop(columns=lacking).to_parquet(tmp_path / "rollouts.parquet")
        code, printed = commands.run([f"run={tmp_path / 'rollouts.parquet'}"], log, script="forecast")
        assert code == 2 and printed.startswith("error: ") and name in printed and "log_sum_sq_probs" in printed
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "trainer_state.json").write_text("{}")
    with pytest.raises(RunError, match="plain TRL run, which logs no score norms. A forecast reads the columns prompt"):
        read_kept(tmp_path / "trl", None)
    with pytest.raises(RunError, match="step=7 has no samples in .*; kept: 1, 2"):
        read_kept(run, [7])
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(RunError, match="is no parquet file"):
        read_kept(tmp_path / "text.parquet", None)


def test_unscored_rollouts_are_left_out(run):
    rows = read_kept(run, [2])[2]
    rows.loc[rows.index[0], "reward"] = np.nan
    assert [len(prompt.rewards) for prompt in scored_rollouts(rows, "here")] == [3, 4, 4, 4]


def test_rewards_that_never_differ_are_refused(sampled, tmp_path, log):
    folder, _ = sampled
    rows = pd.read_parquet(folder / "rollouts" / "prompt-0000-16.parquet").assign(reward=1.0)
    rows.to_parquet(tmp_path / "rollouts.parquet")
    code, printed = commands.run([f"run={tmp_path / 'rollouts.parquet'}"], log, script="forecast")
    assert code == 2 and "rewards differ in none of the 1 prompts" in printed


# ---- the sentence


def test_sentence_names_the_best_the_best_unbiased_one_and_the_limits():
    table = pd.DataFrame(
        {
            "estimator": ["rloo", "otb", "otb_loo", "none"],
            "unbiased": [True, False, True, True],
            "forecast": [1.0, 0.5, 0.8, 0.9],
            "forecast_low": [1.0, 0.4, 0.7, 0.7],
            "forecast_high": [1.0, 0.6, 0.9, 1.1],
            "self_inclusion": [np.nan, 0.6, np.nan, np.nan],
        }
    )
    room, contrast = {"token_gain": 0.02, "token_gain_most": 0.05}, {"prompts": 20}
    facts = Facts(rollouts=80, unscored=0, cut=0.4, with_tools=True, mean_reward=0.5)
    assert advice(table, 4, room, contrast, facts) == (
        "At N = 4 take otb with 0.50 [0.40, 0.60] of rloo's noise (60% of that gain is self-inclusion); the best "
        "unbiased one is otb_loo with 0.80 [0.70, 0.90] of rloo's noise; a baseline per token could add about 2% to "
        f"what one number gains, at the very most 5%; this forecast was off by up to {OFF[True]:.0%} where it was "
        "checked with tools, is about rollouts of which 40% were cut at a limit, and does not see the bias of a "
        "direction."
    )
    text = advice(table.assign(forecast_high=1.2), 4, {}, contrast, facts)
    assert text.startswith(
        "At N = 4 keep rloo, as no other baseline's interval lies below 1; what a baseline per token"
    )


# ---- refusals

REFUSED = {
    "group_sizes=[4,80]": ("group_sizes=[4, 80]", "from 2 to rollouts = 64", "Try group_sizes=[4]"),
    "group_sizes=[1]": ("group_sizes=[1]", "from 2", "Try group_sizes=[4]"),
    "estimators=[otb,otb_lo]": ("otb_lo is not a baseline", "Did you mean otb_loo?", "Known: "),
    "estimators=energy_probe": ("energy_probe reads hidden_states", "score norms alone", "experiments/variance.py"),
    "estimators=otb_exact": ("otb_exact reads prefix_norms", "score norms alone"),
    "checkpoint=nowhere/step-1": ("checkpoint=nowhere/step-1", "is not a folder", "Give RUN/checkpoints"),
    "prompts=2": ("prompts=2", "whole number >= 3", "Try prompts=3"),
    "rollouts_by=vllm": ("rollouts_by=vllm", "another sampler has other numerics", "log_energy=true", "run=RUN"),
    "rollouts_by.rows=0": ("rollouts_by.rows=0", "whole number >= 1"),
    "steps=[20]": ("steps=[20]", "Add run=RUN"),
    "run=nowhere": ("run=nowhere does not exist", "Give a run directory, or a parquet file"),
    "temperature=0": ("temperature=0", "positive number", "Try temperature=1.0"),
    "baseline=otb": ("baseline", "no key of this project", "estimators"),
    "task=math500": ("task math500 has train_split=null", "rows are for evaluation", "Try task=gsm8k"),
    "task=gsm8k": ("path='openai/gsm8k'", "not in the cache", "python experiments/prefetch.py --dataset openai/gsm8k"),
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_forecast_is_refused_in_one_line(typed, tmp_path, log):
    code, printed = commands.run([typed, f"runs_dir={tmp_path / 'runs'}"], log, script="forecast")
    assert code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    for part in REFUSED[typed]:
        assert part in printed
    assert not (tmp_path / "runs").exists()


def test_keys_that_a_run_has_settled_are_refused_beside_it(tmp_path, log):
    code, printed = commands.run([f"run={tmp_path}", "temperature=0.5"], log, script="forecast")
    assert code == 2 and "temperature would be ignored" in printed


def test_the_command_as_typed_refuses_before_it_imports_anything_heavy(tmp_path):
    done = commands.run_light(["estimators=energy_probe", f"runs_dir={tmp_path}"], script="forecast")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_too_few_prompts_and_a_sampler_that_is_not_the_softmax_are_refused(policy, tmp_path, log):
    code, printed = commands.run(given(policy, tmp_path, prompts=11), log, script="forecast")
    assert code == 2 and "prompts=11 are more than the task's 10 rows. Try prompts=10." in printed
    shutil.copytree(policy, tmp_path / "policy")
    file = tmp_path / "policy" / "generation_config.json"
    file.write_text(file.read_text().replace("{", '{"typical_p": 0.9,', 1))
    code, printed = commands.run(given(tmp_path / "policy", tmp_path), log, script="forecast")
    assert code == 2 and "error: typical_p=0.9 in the model's generation_config.json" in printed
