"""analysis.runs.load: runs to tables, the cache, damaged files, and what must not be compared."""

import json
import os
import pydoc
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from analysis import arms
from analysis.checks import one_setting
from analysis.runs import load as load_module
from analysis.runs.load import load
from analysis.runs.marks import setting_differences, setting_labels
from otb.errors import RunError
from otb.records.lock_file import machine
from tests.support.analysis_runs import write_run, write_sweep

CONFIGURATIONS = Path(__file__).parents[2] / "conf" / "baseline"


def arm(target, folder=CONFIGURATIONS, **arguments):
    keys = {f"baseline.{key}": value for key, value in arguments.items()}
    return arms.arm_name(
        {"kind": "otb", "run": "a", "baseline._target_": target, **keys}, arms.shipped_baselines(folder)
    )


@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGURATIONS.glob("*.yaml")))
def test_an_arm_as_shipped_is_called_as_on_the_command_line(name):
    keys = yaml.safe_load((CONFIGURATIONS / f"{name}.yaml").read_text())
    assert arm(keys.pop("_target_"), **keys) == name


def test_an_arm_has_one_name_whichever_way_it_was_typed():
    otb, value = "otb.baselines.otb.otb", "otb.baselines.value.Value"
    assert arm(otb, _partial_=True, tail="carry") == "otb_carry"  # baseline=otb baseline.tail=carry
    assert arm(otb, tail="zero") == "otb"  # baseline=otb_carry baseline.tail=zero
    assert arm(otb) == "otb"  # a run older than the argument
    assert arm(otb, tail="own") == "otb tail=own"
    assert arm(value, learning_rate=0.001, epochs=20) == "value epochs=20"
    assert arm(value, learning_rate=None, epochs=10) == "value learning_rate=null"
    assert arms.arm_override("value epochs=20") == "baseline=value baseline.epochs=20"


def test_an_arm_without_a_yaml_is_called_by_its_function_and_all_arguments(tmp_path):
    assert arm("mine.baselines.median", quantile=0.5) == "median quantile=0.5"
    assert arm("mine.running.Running", decay=0.9) == "running decay=0.9"  # a class: by its module
    assert arm("otb.baselines.otb.otb", tmp_path / "absent", tail="zero") == "otb tail=zero"  # conf/ is not installed


def test_a_new_baseline_is_one_file_and_one_yaml_for_the_figures_too(tmp_path, monkeypatch):
    folder = tmp_path / "conf"
    shutil.copytree(CONFIGURATIONS, folder)
    target = "otb.baselines.running_mean.RunningMean"
    (folder / "running_mean.yaml").write_text(f"_target_: {target}\ndecay: 0.9\n")
    monkeypatch.setattr(arms, "CONFIGURATIONS", folder)
    for seed, decay in enumerate((0.9, 0.5)):
        changes = {"baseline": {"_target_": target, "decay": decay}}
        write_run(tmp_path / "runs", "running_mean", seed=seed, changes=changes)
    runs = load(tmp_path / "runs").runs
    assert list(runs.baseline) == ["running_mean", "running_mean decay=0.5"]
    assert list(runs.arm) == ["running mean, N=4", "running mean decay=0.5, N=4"]
    assert [arms.label(name) for name in runs.baseline] == ["running mean", "running mean decay=0.5"]
    assert all(arms.colour(name).startswith("#") and arms.marker(name) for name in runs.baseline)
    (folder / "broken.yaml").write_text("- a list\n")
    with pytest.raises(RunError, match="broken.yaml is no baseline"):
        load(tmp_path / "runs")


def test_what_is_known_of_an_arm_agrees_with_its_baseline():
    """A baseline may declare whether it is unbiased; figures must not say otherwise."""
    for name, shipped in arms.shipped_baselines().items():
        declared = getattr(pydoc.locate(shipped["_target_"]), "unbiased", None)
        assert name not in arms.ARMS or declared in (None, arms.is_unbiased(name)), name


def test_labels_of_arms_keep_their_arguments():
    assert arms.label("otb_carry", 4) == "OTB (carry), N=4" and arms.label("otb tail=own") == "OTB tail=own"
    assert arms.label("TRL: their_run", float("nan")) == "TRL: their_run"


def test_a_row_per_run_and_step_with_evaluations_joined(tmp_path):
    write_run(tmp_path, steps=40, every=10)
    loaded = load(tmp_path)
    assert len(loaded.runs) == 1 and loaded.warnings == ()
    assert list(loaded.steps.step) == list(range(41))  # step 0 is the evaluation before training
    assert loaded.steps.evaluation_accuracy.notna().sum() == 5
    row = loaded.steps.set_index("step").loc[20]
    assert row.accuracy == row.evaluation_accuracy == pytest.approx(0.8)
    assert row.own_tokens_total == row.evaluation_own_tokens_total == 16 * 4 * 25 * 20
    assert np.isnan(loaded.steps.accuracy[0])


def test_configuration_keys_are_columns_and_arms_follow_from_them(tmp_path):
    write_run(tmp_path, "otb", changes={"baseline": {"_target_": "otb.baselines.otb.otb", "tail": "zero"}})
    carry = {"_target_": "otb.baselines.otb.otb", "tail": "carry"}
    write_run(tmp_path / "b", "otb", seed=1, changes={"baseline": carry})
    runs = load(tmp_path).runs
    assert set(runs["task.train_prompts"]) == {64}
    assert sorted(runs.arm) == ["OTB (carry), N=4", "OTB, N=4"]


def test_only_changed_runs_are_read_again(tmp_path, monkeypatch):
    write_sweep(tmp_path, seeds=1)
    first, read = load(tmp_path), []
    real = load_module.read_run
    monkeypatch.setattr(load_module, "read_run", lambda path, name: read.append(name) or real(path, name))
    assert load(tmp_path).steps.equals(first.steps) and read == []
    with open(tmp_path / "otb-n4-seed0" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 41, "accuracy": 0.5}) + "\n")
    shutil.rmtree(tmp_path / "grpo-n4-seed0")
    again = load(tmp_path)
    assert read == ["otb-n4-seed0"]
    assert "grpo-n4-seed0" not in set(again.steps.run) and len(again.runs) == len(first.runs) - 1
    assert again.steps[again.steps.run == "otb-n4-seed0"].step.max() == 41
    fresh = load(tmp_path, cache=False)
    assert fresh.steps[again.steps.columns].equals(again.steps)


def test_a_damaged_cache_is_read_anew(tmp_path):
    write_run(tmp_path)
    first = load(tmp_path)
    for file in (tmp_path / ".analysis").iterdir():
        file.write_bytes(b"damaged")
    assert load(tmp_path).steps.equals(first.steps)


def test_damaged_lines_are_skipped_counted_and_named(tmp_path):
    path = write_run(tmp_path, steps=20)
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[3] = '{"step": 4, "accur\n'
    lines[5] = "\xff\x00 not json\n"
    lines[7] = '{"no_step": 1}\n'
    file.write_bytes("".join(lines).encode("latin-1") + b'{"step": 21, "accu')  # a crash cut the last line
    loaded = load(tmp_path)
    assert loaded.warnings == (f"{file}: 4 damaged lines skipped",)
    assert set(range(1, 21)) - set(loaded.steps.step) == {4, 6, 8}
    assert load(tmp_path).warnings == loaded.warnings  # from the cache as well


def test_nan_rows_of_another_writer_are_read(tmp_path):
    path = write_run(tmp_path, steps=10)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": NaN, "gradient_norm": Infinity}\n')
    rows = load(tmp_path).steps.set_index("step")
    assert np.isinf(rows.gradient_norm[11]) and np.isnan(rows.loss[11])


def test_metrics_missing_in_older_runs_stay_missing(tmp_path):
    path = write_run(tmp_path, steps=10)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({key: row[key] for key in ("step", "reward_mean")}) for row in rows]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_run(tmp_path, seed=1, steps=10)
    steps = load(tmp_path).steps
    assert steps[steps.seed == 0].gradient_norm.isna().all() and steps[steps.seed == 1].gradient_norm.notna().any()


def test_unfinished_and_moved_runs_are_left_out_unless_asked_for(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, state="running")
    write_run(tmp_path, seed=2).rename(tmp_path / "otb-n4-seed2.20260101-120000")
    loaded = load(tmp_path)
    assert set(loaded.used.run) == {"otb-n4-seed0"}
    assert any("otb-n4-seed1: not finished" in warning for warning in loaded.warnings)
    assert set(load(tmp_path, include=("unfinished",)).used.seed) == {0, 1}


def test_a_run_whose_process_is_gone_is_called_killed_and_its_files_stay_as_they_are(tmp_path):
    """The lock names this process with another start time: its process id was given to another process since."""
    path = write_run(tmp_path, state="running")
    lock = {"machine": machine(), "pid": os.getpid(), "process_started": 12345.0}
    (path / "lock.json").write_text(json.dumps(lock))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for _ in range(2):  # the second time from the cache
        loaded = load(tmp_path)
        assert list(loaded.runs.outcome) == ["killed"]
        assert loaded.warnings == ("left out: otb-n4-seed0: not finished: killed; --include unfinished uses them",)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    lock["process_started"] = psutil.Process().create_time()
    (path / "lock.json").write_text(json.dumps(lock))
    assert list(load(tmp_path).runs.outcome) == ["running"]


def test_the_folder_of_a_sweep_stands_for_the_runs_that_its_job_files_name(tmp_path):
    runs_dir = tmp_path / "runs"
    named = [write_run(runs_dir / "arithmetic-tiny", seed=seed) for seed in (0, 1)]
    write_run(runs_dir / "arithmetic-tiny", seed=2)  # of another sweep
    sweep = runs_dir / "sweep-1a2b3c4d"
    sweep.mkdir()
    for number, run in enumerate([*named, runs_dir / "arithmetic-tiny" / "not-begun"]):
        (sweep / f"job-{number:05d}.json").write_text(json.dumps({"number": number, "run": str(run)}))
    loaded = load(sweep)
    assert list(loaded.runs.run) == ["arithmetic-tiny/otb-n4-seed0", "arithmetic-tiny/otb-n4-seed1"]
    assert loaded.directory("arithmetic-tiny/otb-n4-seed1") == named[1]
    moved = runs_dir.rename(tmp_path / "moved")
    assert list(load(moved / sweep.name).runs.run) == list(loaded.runs.run)
    (moved / "arithmetic-tiny").rename(tmp_path / "gone")
    with pytest.raises(RunError, match=r"none of its runs has begun: python -m slurm.status"):
        load(moved / sweep.name)


def test_a_diverged_run_is_a_result_and_is_kept(tmp_path):
    write_run(tmp_path, state="failed", error="RunError: loss=nan at step 40; training stops.")
    write_run(tmp_path, seed=1, state="failed", error="KeyboardInterrupt: ")
    loaded = load(tmp_path)
    assert list(loaded.runs.outcome) == ["diverged", "failed"]
    assert set(loaded.used.seed) == {0}


def test_other_versions_lengths_and_duplicates_are_marked(tmp_path):
    for seed in range(3):
        write_run(tmp_path, seed=seed)
    write_run(tmp_path, seed=3, environment={"versions": {"otb": "0.1.0", "torch": "2.0"}})
    write_run(tmp_path, seed=4, steps=20)
    write_run(tmp_path / "again", seed=0)
    reasons = load(tmp_path).runs.set_index("run").left_out
    assert "torch 2.0" in reasons["otb-n4-seed3"]
    assert "number of steps" in reasons["otb-n4-seed4"]
    assert "second run" in reasons["otb-n4-seed0"] or "second run" in reasons["again/otb-n4-seed0"]
    assert (reasons == "").sum() == 3


def test_a_run_made_again_with_other_versions_replaces_nothing_and_loses_nothing(tmp_path):
    write_run(tmp_path / "a", seed=0, environment={"versions": {"otb": "0.1.0", "torch": "2.0"}})
    for seed in range(3):
        write_run(tmp_path / "b", seed=seed)
    assert set(load(tmp_path).used.run) == {f"b/otb-n4-seed{seed}" for seed in range(3)}


def test_other_commits_are_marked_and_used(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, environment={"commit": "b" * 40})
    loaded = load(tmp_path)
    assert loaded.used.seed.nunique() == 2 and "made at 2 commits" in loaded.warnings[0]


def test_a_run_from_before_a_key_shares_the_setting_of_one_that_has_its_default(tmp_path):
    write_run(tmp_path, seed=0)
    write_run(tmp_path, seed=1, changes={"rollouts_by": {"name": "hf"}, "geometric_ratio_band": None})
    runs = load(tmp_path).runs
    assert runs.setting.nunique() == 1 and setting_differences(runs) == {}
    write_run(tmp_path, seed=2, changes={"rollouts_by": {"name": "vllm"}})
    runs = load(tmp_path).runs
    assert runs.setting.nunique() == 2
    assert setting_differences(runs) == {"rollouts_by.name": ["absent or default", "vllm"]}
    assert sorted(setting_labels(runs).values()) == ["rollouts_by.name=vllm", "without rollouts_by.name"]


def test_settings_are_never_mixed(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, changes={"learning_rate": 0.01, "runs_dir": "elsewhere"})
    loaded = load(tmp_path)
    assert loaded.runs.setting.nunique() == 2
    assert setting_differences(loaded.runs) == {"learning_rate": ["0.001", "0.01"]}
    with pytest.raises(RunError, match="mixes 2 settings"):
        one_setting(loaded.used)


def test_a_plain_trl_run_is_read_from_its_trainer_state(tmp_path):
    write_run(tmp_path, seed=0)
    history = [
        {"step": step, "loss": 0.1, "grad_norm": 0.2, "reward": 0.5, "num_tokens": 9.0, "epoch": 0.1} for step in (1, 2)
    ] + [{"step": 2, "eval_reward": 0.6}, {"step": 2, "train_loss": 0.1}]
    for step in (1, 2):
        folder = tmp_path / "outside" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = {"global_step": step, "max_steps": 2, "log_history": history[:1] if step == 1 else history}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    loaded = load(tmp_path)
    assert set(loaded.used.run) == {"otb-n4-seed0"}  # it never enters the statistics of an arm
    outside = loaded.outside
    assert list(outside.step) == [1, 2] and list(outside.reward_mean) == [0.5, 0.5]
    assert outside.evaluation_reward_mean.iloc[-1] == 0.6
    assert outside.own_tokens_total.isna().all()  # TRL's num_tokens counts prompts: not guessed


def test_an_empty_or_missing_folder_says_how_to_get_runs(tmp_path):
    with pytest.raises(RunError, match="holds no run.*python experiments/run.py"):
        load(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        load(tmp_path / "absent")


def test_a_single_run_folder_loads(tmp_path):
    loaded = load(write_run(tmp_path))
    assert list(loaded.runs.run) == ["otb-n4-seed0"] and loaded.directory("otb-n4-seed0").exists()
