"""What a run directory's state makes of a command: start, skip, continue, begin anew, refuse; and what fails."""

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from experiments.run import continues, may_note
from experiments.running.run_lock import RunLock
from otb.records import RunDirectory
from otb.records.metric_names import METRICS
from tests.support import commands
from tests.support.commands import arguments, rows, the_run, without_times
from tests.support.holds import Hold
from tests.support.same_runs import assert_same_run

REFUSED = 2


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


@pytest.fixture(scope="module")
def four_steps(policy, tmp_path_factory, log):
    """A finished run, for tests that leave it as it is or copy it."""
    runs_dir = tmp_path_factory.mktemp("finished")
    code, printed = commands.run(arguments(runs_dir, model__name=policy, steps=4), log)
    assert code == 0, printed
    return runs_dir


@pytest.fixture
def copied(four_steps, tmp_path):
    """The same in a folder of the test's own -> (runs_dir, run directory)."""
    shutil.copytree(four_steps, tmp_path / "runs")
    return tmp_path / "runs", the_run(tmp_path / "runs")


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_finished_run_is_skipped_with_a_line_that_says_so(policy, four_steps, log):
    run = the_run(four_steps)
    before = contents(run)
    code, printed = commands.run(arguments(four_steps, model__name=policy, steps=4), log)
    assert code == 0
    assert printed == f"{run}: finished at step 4, nothing to do. steps=N continues it, overwrite=true starts anew.\n"
    assert contents(run) == before
    code, printed = commands.run(arguments(four_steps, model__name=policy, steps=2), log)
    assert (code, contents(run)) == (0, before)


def test_more_steps_continue_a_finished_run_as_if_it_had_never_stopped(policy, copied, tmp_path, log):
    runs_dir, run = copied
    code, printed = commands.run(arguments(runs_dir, model__name=policy, steps=8), log)
    assert code == 0 and "resuming at step 4" in printed
    code, printed = commands.run(arguments(tmp_path / "whole", model__name=policy, steps=8), log)
    assert code == 0, printed
    assert_same_run(run, the_run(tmp_path / "whole"))


def test_more_steps_are_refused_where_the_schedule_ended(policy, tmp_path, log):
    given = dict(model__name=policy, trainer__lr_scheduler_type="linear")
    assert commands.run(arguments(tmp_path, steps=2, **given), log)[0] == 0
    code, printed = commands.run(arguments(tmp_path, steps=4, **given), log)
    assert code == REFUSED
    assert "steps=4 would continue a run of steps=2, whose learning rate follows linear to its end." in printed


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"lr_scheduler_type": "constant"}, True),
        ({"lr_scheduler_type": "cosine"}, False),
        ({"lr_scheduler_type": "constant_with_warmup"}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, False),  # a share of all steps
    ],
)
def test_more_steps_are_taken_where_they_leave_the_first_learning_rates_alone(trainer, expected):
    assert continues(trainer) is expected


def test_overwrite_moves_the_old_run_aside_and_starts_anew(policy, copied, log):
    runs_dir, run = copied
    before, run_id = contents(run), RunDirectory(run).run_id()
    before["run_id"] = run_id.encode()
    code, printed = commands.run(arguments(runs_dir, model__name=policy, steps=4, overwrite="true"), log)
    assert code == 0 and "the old run is now" in printed and "resuming" not in printed
    (aside,) = (path for path in run.parent.iterdir() if path != run)
    assert contents(aside) == before
    assert without_times(run / "metrics.jsonl") == without_times(aside / "metrics.jsonl")
    assert RunDirectory(run).run_id() != run_id  # a tracker must not write into the old run


@pytest.mark.parametrize(("name", "restarts"), [("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("OTB_SWEEP", "OTB_RESTARTS")])
def test_a_restart_overwrites_what_its_job_or_sweep_has_not_begun_and_nothing_else(name, restarts, policy, copied, log):
    """The first start may have ended before it obeyed: the finished run that it found is not the one asked for."""
    runs_dir, run = copied
    before = contents(run)
    starts = ((4, "1", "the old run is now"), (4, "2", "nothing to do"), (6, "3", "resuming at step 4"))
    for steps, count, said in starts:
        given = arguments(runs_dir, model__name=policy, steps=steps, overwrite="true")
        code, printed = commands.run(given, log, **{name: "7", restarts: count})
        assert code == 0 and said in printed, printed
    (aside,) = (path for path in run.parent.iterdir() if path != run)
    assert contents(aside) == before


def test_another_configuration_is_refused_with_the_difference(policy, copied, log):
    runs_dir, run = copied
    config = OmegaConf.load(run / "config.yaml")
    config.learning_rate, config.trainer.weight_decay = 0.5, 0.25
    OmegaConf.save(config, run / "config.yaml")
    before = contents(run)
    code, printed = commands.run(arguments(runs_dir, model__name=policy, steps=4), log)
    assert code == REFUSED
    assert "learning_rate: 0.5 -> 0.001\n  trainer.weight_decay: 0.25 -> 0.0\n" in printed
    assert "overwrite=true" in printed
    assert contents(run) == before


def test_a_second_process_is_refused_at_once_and_the_first_is_not_disturbed(policy, tmp_path, log):
    given, hold = arguments(tmp_path / "runs", model__name=policy, steps=4), Hold(tmp_path / "hold", "row 1")
    first = commands.start(given, log, **hold.environment)
    hold.wait(first)
    run = the_run(tmp_path / "runs")
    code, printed = commands.run(given, tmp_path / "second")  # waiting for the first would take for ever
    assert code == REFUSED
    assert f"{run} is in use by process {first.pid}" in printed and "Wait for it" in printed
    hold.release()
    commands.join(first)
    assert first.exitcode == 0
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_process_whose_lock_was_taken_over_stops_before_its_next_row(policy, tmp_path, log):
    hold = Hold(tmp_path / "hold", "row 1")
    process = commands.start(arguments(tmp_path / "runs", model__name=policy), tmp_path / "log", **hold.environment)
    hold.wait(process)
    run = the_run(tmp_path / "runs")
    lock = json.loads((run / "lock.json").read_text()) | {"token": "another's", "host": "elsewhere", "machine": "x"}
    (run / "aside").write_text(json.dumps(lock))
    os.replace(run / "aside", run / "lock.json")
    hold.release()
    commands.join(process)
    assert process.exitcode == REFUSED and len(rows(run / "metrics.jsonl")) == 1
    assert "was taken over by another process; this one stops here" in (tmp_path / "log").read_text()
    assert json.loads((run / "lock.json").read_text())["token"] == "another's"


def test_a_failure_of_the_second_process_is_that_of_the_run(policy, tmp_path):
    """The first one only loses it, and says so after it."""
    (tmp_path / "broken").touch()
    broken = {"OTB_TEST_FAILING_FILE": str(tmp_path / "broken"), "OTB_TEST_FAILING_RANK": "1"}
    first, second = commands.run_two(arguments(tmp_path / "runs", model__name=policy), tmp_path / "log", **broken)
    assert first[0] != 0 and second[0] != 0
    status = RunDirectory(the_run(tmp_path / "runs")).status()
    assert (status["state"], status["error"]) == ("failed", "ValueError: the reward of this rank is broken")


@pytest.mark.parametrize(
    ("state", "port", "noted"),
    [
        ("running", "29500", True),
        ("finished", "29500", False),
        ("failed", "29500", False),  # the first reason stays
        ("running", "29501", False),  # the lock was taken over by another run
    ],
)
def test_a_process_without_the_lock_notes_the_end_of_its_own_run_alone(tmp_path, monkeypatch, state, port, noted):
    directory = RunDirectory(tmp_path)
    directory.write_status(state, step=2, steps=4)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with RunLock(tmp_path):
        monkeypatch.setenv("MASTER_PORT", port)
        assert may_note(directory, None) == noted
    assert not may_note(directory, None)  # the first process is gone, and has noted how


def test_trackers_are_told_the_run_they_belong_to_and_no_others_are(monkeypatch, tmp_path):
    from experiments.running.trackers import prepare, run_name

    names = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "TENSORBOARD_LOGGING_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is put back at the end
        monkeypatch.delenv(name)
    directory = RunDirectory(tmp_path / "arithmetic-tiny" / "otb-n4-seed0")
    directory.path.mkdir(parents=True)
    prepare([], directory)
    assert not set(names) & os.environ.keys() and not list(directory.path.iterdir())
    prepare(["wandb"], directory)
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == (directory.run_id(), "allow")
    assert os.environ["WANDB_DIR"] == str(directory.path) and "TENSORBOARD_LOGGING_DIR" not in os.environ
    prepare(["tensorboard"], directory)
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(directory.path / "tensorboard")
    assert run_name(["wandb"], directory) == "arithmetic-tiny/otb-n4-seed0"
    assert run_name(["trackio"], directory) == f"arithmetic-tiny/otb-n4-seed0-{directory.run_id()}"


def test_a_sweep_goes_on_after_a_run_that_fails_and_says_so_in_table_and_exit_status(policy, tmp_path, log):
    """Also where -m stands in the middle, and where runs of the sweep were finished before."""
    given = [*arguments(tmp_path, model__name=policy, group_size=None, steps=2), "-m", "hydra/launcher=basic"]
    code, printed = commands.run([*given, "baseline=rloo", "group_size=2"], log)
    assert code == 0, printed
    code, printed = commands.run([*given, "baseline=rloo,otb", "group_size=1,2"], log)
    assert code == 1
    assert "0: rloo-n1-seed0: group_size=1: baseline rloo compares" in printed
    assert printed.count("failed: ") == 1 and "Traceback" not in printed
    assert printed.count("finished at step 2, nothing to do") == 1
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in printed.splitlines() if line.startswith("│")]
    assert cells == [
        ["rloo-n1-seed0", "not started"],
        ["rloo-n2-seed0", "finished"],
        ["otb-n1-seed0", "finished"],
        ["otb-n2-seed0", "finished"],
    ]


@pytest.mark.parametrize(
    ("largest_file", "what"),
    [(1_000, ""), (1_000_000, "checkpoints"), (2_000_000, "checkpoints")],
    ids=["at the start", "in the weights", "in the optimizer's state"],
)
def test_a_full_disk_is_a_clear_error_and_leaves_nothing_half_written(policy, four_steps, tmp_path, largest_file, what):
    given, log = arguments(tmp_path, model__name=policy, steps=4), tmp_path / "log"
    code, printed = commands.run(given, log, limit=largest_file)
    assert code == REFUSED
    error = printed[printed.index("error: ") :]
    assert f"{what} cannot be written: " in error and "free space" in error and "Traceback" not in printed
    assert any(reason in error for reason in ("File too large", "only part of the file fitted"))
    assert len(error) < 500
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != log]
    assert not [path for path in written if path.name.startswith(".") or ".writing" in str(path)]
    for file in (path for path in written if path.suffix == ".jsonl"):
        rows(file)  # whole lines only
    code, printed = commands.run(given, log)
    assert code == 0, printed
    if what == "checkpoints":
        assert_same_run(the_run(tmp_path), the_run(four_steps))


def test_an_unwritable_runs_dir_is_a_clear_error(policy, tmp_path, log):
    (tmp_path / "runs").mkdir(mode=0o555)
    code, printed = commands.run(arguments(tmp_path / "runs", model__name=policy), log)
    assert code == REFUSED
    assert printed.startswith("error: ") and "cannot be written: Permission denied" in printed
    assert "fix its permissions" in printed
    assert not list((tmp_path / "runs").iterdir())


def test_a_checkpoint_folder_that_turns_read_only_is_a_clear_error_and_the_run_can_go_on(policy, four_steps, tmp_path):
    given, log = arguments(tmp_path / "runs", model__name=policy, steps=4), tmp_path / "log"
    hold = Hold(tmp_path / "hold", "row 1")
    process = commands.start(given, log, **hold.environment)
    hold.wait(process)
    checkpoints = the_run(tmp_path / "runs") / "checkpoints"
    checkpoints.chmod(0o555)
    hold.release()
    commands.join(process)
    assert process.exitcode == REFUSED
    assert f"{checkpoints} cannot be written: " in log.read_text() and "Traceback" not in log.read_text()
    assert RunDirectory(checkpoints.parent).status()["state"] == "failed"
    code, printed = commands.run(given, log)  # refused at the start now
    assert code == REFUSED and f"{checkpoints} cannot be written: Permission denied" in printed
    checkpoints.chmod(0o755)
    code, printed = commands.run(given, log)
    assert code == 0, printed
    assert_same_run(checkpoints.parent, the_run(four_steps))


def test_an_infinite_loss_stops_with_its_step_and_rollouts_before_the_weights_change(policy, copied, tmp_path, log):
    runs_dir, run = copied
    checkpoint = RunDirectory(run).checkpoint(4) / "model.safetensors"
    before, given = checkpoint.read_bytes(), arguments(runs_dir, model__name=policy, steps=6)
    code, printed = commands.run(given, log, OTB_TEST_INFINITE_REWARD="1")
    assert code == REFUSED
    assert "at step 5; it must be finite, and training stops before the weights change" in printed
    assert f"python -m analysis.runs.show {run} --step 5" in printed and "Traceback" not in printed
    status = RunDirectory(run).status()
    assert (status["state"], status["step"]) == ("failed", 4)
    rollouts = pd.read_parquet(run / "rollouts" / "failed-00000005.parquet")
    assert len(rollouts) == 8 and set(rollouts["step"]) == {5} and rollouts["reward"].eq(float("inf")).all()
    assert checkpoint.read_bytes() == before
    code, printed = commands.run(given, log)  # the cause mended, the same command goes on
    assert code == 0 and "resuming at step 4" in printed
    assert (run / "rollouts" / "failed-00000005.parquet").exists()  # evidence stays


def test_the_last_checkpoint_loads_like_any_model(four_steps):
    model = AutoModelForCausalLM.from_pretrained(RunDirectory(the_run(four_steps)).checkpoint(4))
    assert all(torch.isfinite(weights).all() for weights in model.parameters())


def test_only_the_last_checkpoint_holds_an_optimizer_state(four_steps):
    directory = RunDirectory(the_run(four_steps))
    assert directory.checkpoint_steps()[-1] == 4
    for step in directory.checkpoint_steps():
        assert (directory.checkpoint(step) / "optimizer.pt").exists() == (step == 4)


def test_rows_hold_only_defined_names_and_all_that_were_measured(four_steps):
    measured = [
        *("step", "own_tokens", "own_tokens_total", "reward_mean", "reward_spread", "accuracy", "equal_reward_groups"),
        *("response_length_mean", "response_length_max", "truncated", "gradient_norm", "loss", "entropy"),
        *(
            "learning_rate",
            "advantage_mean",
            "advantage_spread",
            "advantage_max",
            "baseline_mean",
            "baseline_spread",
            "energy_mean",
        ),
        *("energy_spread", "total_power", "seconds_sampling", "seconds_scoring", "seconds_advantages", "seconds_loss"),
        *("seconds_step", "peak_memory_bytes"),
    ]
    for row in rows(the_run(four_steps) / "metrics.jsonl"):
        assert row.keys() <= METRICS.keys()
        assert set(measured) <= row.keys()
        assert not {"kl", "tool_tokens", "tool_tokens_total", "grade_wrong", "unscored"} & row.keys()
        parts = sum(row[f"seconds_{part}"] for part in ("sampling", "scoring", "advantages", "loss"))
        assert parts == pytest.approx(row["seconds_step"])


def test_environment_holds_what_is_needed_to_run_again(copied, policy, log):
    runs_dir, run = copied
    code, printed = commands.run(arguments(runs_dir, model__name=policy, steps=6, threads=2), log, SLURM_JOB_ID="42")
    assert code == 0, printed
    assert "going on with threads=2 instead of 1" in " ".join(printed.split())  # however wide the terminal
    facts = json.loads((run / "environment.json").read_text())
    assert facts["versions"].keys() >= {"otb", "torch", "transformers", "trl", "peft", "accelerate", "datasets"}
    assert facts["command"][:2] == ["python", "experiments/run.py"] and "steps=6" in facts["command"]
    assert (facts["job_id"], facts["threads"], facts["processes"], facts["devices"]) == ("42", 2, 1, ["cpu"])
    assert facts["host"] and facts["python"] and facts["platform"]
    assert len(facts["model_sha256"]["model.safetensors"]) == 64
    assert facts["data"]["train"]["rows"] == 10 and len(facts["data"]["train"]["rows_sha256"]) == 64
    assert facts["data"]["eval"]["rows"] == 4
    assert [(start["job_id"], start["threads"]) for start in facts["starts"]] == [(None, 1), ("42", 2)]
    assert (facts["diff_sha256"] is not None) == (run / "code.diff").exists()
