"""Runs of the real command, killed and given again: they end as if nothing had happened, bit for bit on the CPU."""

import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from otb.records import TIME_AND_MEMORY, RunDirectory
from tests.support import commands
from tests.support.commands import ROOT, arguments, rows, the_run, wait_for

KILLS = 20
COMPARED = {"model.safetensors", "adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "baseline.pt"}


def without_times(file):
    return [{name: value for name, value in row.items() if name not in TIME_AND_MEMORY} for row in rows(file)]


def assert_same_run(interrupted, uninterrupted):
    """Metrics and evaluations (time and memory aside), samples, checkpoints, weights and optimizer state are equal."""
    mine, other = RunDirectory(interrupted), RunDirectory(uninterrupted)
    assert mine.status()["state"] == other.status()["state"] == "finished"
    steps = [row["step"] for row in rows(mine.metrics_file)]
    assert steps == list(range(1, other.status()["step"] + 1)), "a step stands twice or is missing"
    assert without_times(mine.metrics_file) == without_times(other.metrics_file)
    assert without_times(mine.evaluations_file) == without_times(other.evaluations_file)
    assert mine.checkpoint_steps() == other.checkpoint_steps()
    for step in mine.checkpoint_steps():
        files = {path.name for path in other.checkpoint(step).iterdir()}
        assert {path.name for path in mine.checkpoint(step).iterdir()} == files
        for name in files & COMPARED:
            assert (mine.checkpoint(step) / name).read_bytes() == (other.checkpoint(step) / name).read_bytes(), name
    for sample in other.rollouts.iterdir():
        pd.testing.assert_frame_equal(pd.read_parquet(mine.rollouts / sample.name), pd.read_parquet(sample))
    assert not [path.name for path in mine.path.rglob(".*")], "half-written files are left behind"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory, log):
    """The run that the killed ones must equal, and its seconds."""
    runs_dir = tmp_path_factory.mktemp("uninterrupted")
    commands.run(["baseline=ottb"], log)  # the server's imports are not part of the time
    started = time.monotonic()
    code, printed = commands.run(arguments(runs_dir, model__name=policy), log)
    assert code == 0, printed
    return the_run(runs_dir), time.monotonic() - started


def test_a_run_killed_at_20_random_moments_equals_an_uninterrupted_one(policy, uninterrupted, tmp_path, log):
    expected, seconds = uninterrupted
    moments, kills, finished, discarded = random.Random(5), 0, 0, 0
    while kills < KILLS or not discarded:  # a kill between a row and its checkpoint is among them
        last = KILLS if kills < KILLS else kills + 5
        assert last <= 5 * KILLS
        given = arguments(tmp_path / f"runs{finished}", model__name=policy)
        while True:
            process = commands.start(given, log)
            process.join(moments.uniform(0.0, seconds) if kills < last else 120)
            if process.exitcode is not None:
                assert process.exitcode == 0, log.read_text()[-2000:]
                break
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        run = the_run(tmp_path / f"runs{finished}")
        assert_same_run(run, expected)
        discarded += len(rows(run / "discarded.jsonl"))
        finished += 1


def during_checkpoint(run):
    return (run / "checkpoints" / ".writing").exists()


def during_evaluation(run):
    """Between the row of step 2 and the evaluation that follows it."""
    return len(rows(run / "metrics.jsonl")) == 2 and len(rows(run / "evaluations.jsonl")) == 1


def before_first_evaluation(run):
    return (run / "environment.json").exists()


def after_last_checkpoint(run):
    return (run / "checkpoints" / "step-00000006").exists()


@pytest.mark.parametrize(
    "moment", [during_checkpoint, during_evaluation, before_first_evaluation, after_last_checkpoint]
)
def test_a_run_killed_in_the_middle_of_something_equals_an_uninterrupted_one(
    policy, uninterrupted, tmp_path, log, moment
):
    expected, _ = uninterrupted
    given = arguments(tmp_path, model__name=policy)
    run = tmp_path / expected.parent.name / expected.name
    process = commands.start(given, log)
    wait_for(lambda: moment(run) or process.exitcode is not None)
    assert process.exitcode is None, "the moment passed unseen"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    code, printed = commands.run(given, log)
    assert code == 0, printed
    assert_same_run(run, expected)


@pytest.mark.parametrize(
    "changed",
    [
        dict(baseline="grpo"),
        dict(baseline="energy_probe", baseline__group_correction="true"),
        dict(baseline="value", model__rollouts_per_forward=4),
        dict(baseline="trajectory_cv"),
        dict(trainer__num_iterations=2),
        dict(measure_gradient_noise="true", model__rollouts_per_forward=4),
        dict(model__lora__r=4),
        dict(model__rollouts_per_forward=2),
        dict(model__lora__r=4, trainer__beta=0.1, model__rollouts_per_forward=4, trainer__num_iterations=2, steps=8),
    ],
    ids=lambda changed: "-".join(f"{key}={value}" for key, value in changed.items()),
)
def test_resume_is_exact_for_every_kind_of_run(policy, tmp_path, log, changed):
    """Killed in its third or fourth step, after the checkpoint of the second, in the second epoch of the prompts."""
    for name, kill in (("whole", False), ("killed", True)):
        given = arguments(tmp_path / name, model__name=policy, **changed)
        if kill:
            process = commands.start(given, log)
            first = RunDirectory(tmp_path / name / the_run(tmp_path / "whole").relative_to(tmp_path / "whole"))
            wait_for(lambda first=first: first.checkpoint_steps() and len(rows(first.metrics_file)) > 2)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert first.status()["state"] == "running", "it ended before it was killed"
        code, printed = commands.run(given, log)
        assert code == 0, printed
        assert ("resuming at step" in printed) == kill
    assert_same_run(the_run(tmp_path / "killed"), the_run(tmp_path / "whole"))
    gradients = [row["gradient_norm"] for row in rows(the_run(tmp_path / "killed") / "metrics.jsonl")]
    assert max(gradients) > 0


def test_a_run_killed_in_its_warm_start_equals_an_uninterrupted_one(tmp_path, log):
    recipe = dict(model__warm_start__steps=24, model__warm_start__careful_steps=12, model__warm_start__batch=8, steps=2)
    for name in ("whole", "killed"):
        cache = {"OTB_CACHE": str(tmp_path / name / "cache")}
        given = arguments(tmp_path / name / "runs", **recipe)
        if name == "killed":
            process = commands.start(given, tmp_path / "log", **cache)
            wait_for(lambda: (tmp_path / "log").exists() and "warm start 9/" in (tmp_path / "log").read_text())
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        code, printed = commands.run(given, log, **cache)
        assert code == 0, printed
        assert "warm start 24/24" in printed
    assert_same_run(the_run(tmp_path / "killed" / "runs"), the_run(tmp_path / "whole" / "runs"))


def test_the_command_as_typed_resumes_after_sigkill(policy, uninterrupted, tmp_path):
    """From another working directory, in processes of its own."""
    expected, _ = uninterrupted
    given = arguments("runs", model__name=policy)
    run = tmp_path / "runs" / expected.parent.name / expected.name
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *given]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    wait_for(lambda: len(rows(run / "metrics.jsonl")) == 3 or process.poll() is not None)
    process.kill()
    process.wait()
    done = commands.run_command_line(given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 2" in done.stdout
    assert_same_run(run, expected)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(policy, uninterrupted, tmp_path, log):
    expected, _ = uninterrupted
    for name, changed in (("again", {"deterministic": "true"}), ("other", {"seed": 1})):
        code, printed = commands.run(arguments(tmp_path / name, model__name=policy, **changed), log)
        assert code == 0, printed
    again, other = (without_times(the_run(tmp_path / name) / "metrics.jsonl") for name in ("again", "other"))
    assert again == without_times(expected / "metrics.jsonl")
    assert other != again


def test_evaluations_and_checkpoints_leave_training_alone(policy, uninterrupted, tmp_path, log):
    expected, _ = uninterrupted
    changed = dict(evaluation__every=0, checkpoint_every=0, rollouts__every=0)
    code, printed = commands.run(arguments(tmp_path, model__name=policy, **changed), log)
    assert code == 0, printed
    assert without_times(the_run(tmp_path) / "metrics.jsonl") == without_times(expected / "metrics.jsonl")
