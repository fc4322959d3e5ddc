"""Runs of the real command, killed and given again: they end as if nothing had happened, bit for bit on the CPU."""

import random
import signal

import pytest

from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import arguments, rows, the_run, without_times
from tests.support.economy import NO_PICTURES
from tests.support.holds import Hold
from tests.support.same_runs import assert_same_run

KILLS = 20
EAGER_SCHEDULE = {  # the third step fires, whose responses are longer than those of the first two
    "schedule__warmup": 2,
    "schedule__baseline_steps": 2,
    "schedule__ratio": 1.0001,
    "schedule__period_factor": 0.6,
}

SEVERAL_METHODS = [
    dict(
        rollouts_by="hf_bfloat16",
        schedule="length_triggered",
        **EAGER_SCHEDULE,
        token_weights="arca",
        token_weights__normalise="running",
        model__lora__r=4,
        baseline="energy_probe",
        improvement="shuffled",
        improvement__window=2,
        improvement__cap=3,
    ),
    dict(
        rollouts_by="hf_bfloat16",
        token_weights="surprisal",
        token_weights__normalise="running",
        auxiliary="mtp_occ_as_code",
        auxiliary__warmup=3,
        trainer__num_iterations=2,
    ),
]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory):
    """The run that the killed ones must equal."""
    runs_dir = tmp_path_factory.mktemp("uninterrupted")
    commands.done(arguments(runs_dir, model__name=policy), runs_dir / "log")
    return the_run(runs_dir)


def test_a_run_killed_at_20_random_moments_equals_an_uninterrupted_one(policy, uninterrupted, tmp_path):
    """Moments of its own time, that of the processor, so that a loaded machine changes nothing."""
    moments, kills, finished, discarded = random.Random(5), 0, 0, 0
    whole = commands.cpu_seconds(uninterrupted.parents[1] / "log")
    while kills < KILLS or not discarded:  # a kill between a row and its checkpoint is among them
        last = KILLS if kills < KILLS else kills + 5
        assert last <= 5 * KILLS
        given = arguments(tmp_path / f"runs{finished}", model__name=policy)
        while True:
            killed_after = moments.uniform(0.0, whole) if kills < last else None
            process = commands.start(given, tmp_path / "log", cpu_seconds=killed_after)
            commands.join(process)
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGPROF, (tmp_path / "log").read_text()[-2000:]
            kills += 1
        run = the_run(tmp_path / f"runs{finished}")
        assert_same_run(run, uninterrupted)
        discarded += len(rows(run / "discarded.jsonl"))
        finished += 1


def half_a_checkpoint(run):
    """The weights are written, the optimizer's state is not."""
    assert list(run.glob("checkpoints/.writing/*/model.safetensors"))
    assert not list(run.glob("checkpoints/.writing/*/optimizer.pt"))


def no_evaluation(run):
    """The row of step 2 is written, the evaluation that follows it is not."""
    assert len(rows(run / "metrics.jsonl")) == 2 and len(rows(run / "evaluations.jsonl")) == 1


def nothing_measured(run):
    assert (run / "environment.json").exists() and not rows(run / "evaluations.jsonl")


def all_but_the_end(run):
    assert (run / "checkpoints" / "step-00000006").exists() and RunDirectory(run).status()["state"] == "running"


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("writing optimizer.pt", half_a_checkpoint),
        ("row 2", no_evaluation),
        ("reward 1", nothing_measured),
        ("checkpoint 6", all_but_the_end),
    ],
)
def test_a_run_killed_in_the_middle_of_something_equals_an_uninterrupted_one(
    policy, uninterrupted, tmp_path, log, moment, left
):
    given = arguments(tmp_path / "runs", model__name=policy)
    commands.kill_at(moment, given, log, tmp_path / "hold")
    left(the_run(tmp_path / "runs"))
    commands.done(given, log)
    assert_same_run(the_run(tmp_path / "runs"), uninterrupted)


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
        dict(rollouts_by="hf_bfloat16", schedule="length_triggered", **EAGER_SCHEDULE),
        dict(token_weights="arca", token_weights__normalise="running", model__lora__r=4),
        dict(improvement="pipo", improvement__window=3, improvement__cap=3, baseline="otb"),
        dict(auxiliary="mtp", auxiliary__warmup=3, trainer__num_iterations=2),
        *SEVERAL_METHODS,
        dict(evaluation__tasks="[arithmetic]", evaluation__max_rows=3),
        dict(model__lora__r=4, trainer__beta=0.1, model__rollouts_per_forward=4, trainer__num_iterations=2, steps=8),
    ],
    ids=lambda changed: "-".join(f"{key}={value}" for key, value in changed.items()),
)
def test_resume_is_exact_for_every_kind_of_run(policy, tmp_path, log, changed):
    """Killed after its third step and the checkpoint of the second, in the second epoch of the prompts."""
    for name, kill in (("whole", False), ("killed", True)):
        given = arguments(tmp_path / name, model__name=policy, **changed)
        if kill:
            commands.kill_at("row 3", given, log, tmp_path / "hold")
            assert RunDirectory(the_run(tmp_path / name)).checkpoint_steps() == [2]
        printed = commands.done(given, log)
        assert ("resuming at step" in printed) == kill
    assert_same_run(the_run(tmp_path / "killed"), the_run(tmp_path / "whole"))
    metrics = rows(the_run(tmp_path / "killed") / "metrics.jsonl")
    assert max(row["gradient_norm"] for row in metrics) > 0
    assert ("length_surge_step" in metrics[-1]) == ("schedule" in changed), "the schedule fires, and after the kill"
    assert ("improvement_ratio_mean" in metrics[-1]) == ("improvement" in changed), "the window is full after the kill"


@pytest.mark.parametrize("changed", SEVERAL_METHODS, ids=lambda changed: changed["token_weights"])
def test_resume_is_exact_on_two_processes(policy, tmp_path, log, changed):
    for name, kill in (("whole", False), ("killed", True)):
        given = arguments(tmp_path / name, model__name=policy, **changed)
        if kill:
            hold = Hold(tmp_path / "hold", "row 3")
            started = commands.start_two(given, log, **hold.environment)
            hold.wait(started[0])
            for process in started:
                commands.kill(process)
            assert RunDirectory(the_run(tmp_path / name)).checkpoint_steps() == [2]
        for code, printed in commands.run_two(given, log):
            assert code == 0, printed
    assert_same_run(the_run(tmp_path / "killed"), the_run(tmp_path / "whole"))
    *_, before, last = rows(the_run(tmp_path / "killed") / "metrics.jsonl")
    assert before["mismatch_k3"] > 0 and ("improvement_ratio_mean" in last or last["mtp_lambda"] != 0)


def test_a_run_killed_in_its_warm_start_equals_an_uninterrupted_one(tmp_path, log):
    recipe = dict(model__warm_start__steps=24, model__warm_start__careful_steps=12, model__warm_start__batch=8, steps=2)
    for name in ("whole", "killed"):
        cache = {"OTB_CACHE": str(tmp_path / name / "cache")}
        given = arguments(tmp_path / name / "runs", **recipe)
        if name == "killed":
            commands.kill_at("warm start 9", given, log, tmp_path / "hold", **cache)
        assert "warm start 24/24" in commands.done(given, log, **cache)
    assert_same_run(the_run(tmp_path / "killed" / "runs"), the_run(tmp_path / "whole" / "runs"))


def test_the_command_as_typed_resumes_after_sigkill(policy, uninterrupted, tmp_path):
    """Goes on in another working directory, whose `runs` it is. test_local_sweep.py kills a typed command."""
    commands.kill_at("row 3", arguments(tmp_path / "runs", model__name=policy), tmp_path / "log", tmp_path / "hold")
    done = commands.run_command_line(arguments("runs", model__name=policy), cwd=tmp_path, **{NO_PICTURES: "1"})
    assert done.returncode == 0, done.stderr
    assert "resuming at step 2" in done.stdout
    assert_same_run(the_run(tmp_path / "runs"), uninterrupted)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(policy, uninterrupted, tmp_path, log):
    for name, changed in (("again", {"deterministic": "true"}), ("other", {"seed": 1})):
        commands.done(arguments(tmp_path / name, model__name=policy, **changed), log)
    again, other = (without_times(the_run(tmp_path / name) / "metrics.jsonl") for name in ("again", "other"))
    assert again == without_times(uninterrupted / "metrics.jsonl")
    assert other != again


def test_evaluations_and_checkpoints_leave_training_alone(policy, uninterrupted, tmp_path, log):
    changed = dict(evaluation__every=0, checkpoint_every=0, rollouts__every=0)
    commands.done(arguments(tmp_path, model__name=policy, **changed), log)
    assert without_times(the_run(tmp_path) / "metrics.jsonl") == without_times(uninterrupted / "metrics.jsonl")
