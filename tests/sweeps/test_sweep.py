"""What a sweep is called, what of its command counts, where its runs stand, and that all of it is light."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from experiments.sweeps.display import SweepDisplay
from experiments.sweeps.jobs import Job, load_jobs, may_restart, reason_in, sweep_arguments
from experiments.sweeps.runs_of import Composer
from experiments.sweeps.snapshot import take_snapshot
from experiments.sweeps.state import STALE_AFTER_SECONDS, Queued, RunState, state_of
from otb.errors import RunError
from otb.records.lock_file import machine

ROOT = Path(__file__).resolve().parents[2]


def folder(*arguments: str) -> str:
    (found,) = (word for word in sweep_arguments(["-m", *arguments]) if word.startswith("hydra.sweep.dir="))
    return found.removeprefix("hydra.sweep.dir=")


def test_the_folder_of_a_sweep_stands_among_its_overrides():
    words = sweep_arguments(["-m", "seed=0,1", "--help"])
    assert [word.partition("=")[0] for word in words] == ["-m", "hydra.sweep.dir", "seed", "--help"]


def test_the_same_command_names_the_same_sweep_wherever_and_however_it_is_launched():
    name = folder("baseline=otb,grpo", "seed=0,1")
    assert name.startswith("${runs_dir}/sweep-")
    same = ["seed=0,1", "baseline=otb,grpo", "hydra/launcher=slurm", "hydra.launcher.partition=gpu", "wait=false"]
    assert folder(*same, "steps=500", "overwrite=true", "runs_dir=elsewhere") == name
    assert folder("baseline=otb,grpo", "seed=0,1,2") != name
    assert folder("baseline=otb,grpo", "seed=0,1", "hydra.sweeper.params.group_size=1,2") != name


def test_a_sweep_can_be_given_a_name_and_single_runs_have_none():
    assert folder("seed=0,1", "sweep=pilot") == "${runs_dir}/pilot"
    assert folder("seed=0,1", "hydra.sweep.dir=x") == "x"
    assert sweep_arguments(["seed=0"]) == ["seed=0"]
    with pytest.raises(RunError, match="hydra/launcher=slurm belongs to a sweep. Add -m"):
        sweep_arguments(["seed=0", "hydra/launcher=slurm"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["baseline=grpo", "group_size=8", "++trainer.beta=0.1"],
        ["task=gsm8k", "seed=3", "~evaluation.samples"],
        ["experiment=paper_tool_use", "model.name=x", "++model.lora.r=4"],
        ["model=qwen2.5-7b", "learning_rate=1e-5", "steps=4"],
    ],
)
def test_runs_of_a_sweep_compose_as_hydra_composes_them(overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        sweep = compose("config", return_hydra_config=True)
        whole = loader.load_sweep_config(sweep, list(overrides))
        composer = Composer(loader, sweep)
        for _ in range(2):  # the second one from what the first one read
            parts = composer.compose(overrides)
            for config in (whole, parts):
                OmegaConf.set_struct(config, False)
                chosen = dict(config.hydra.runtime.choices)
                assert chosen["baseline"] == ("grpo" if "baseline=grpo" in overrides else "otb")
            assert {**parts, "hydra": None} == {**whole, "hydra": None}


def lock(run: Path, age: float = 0.0, **facts) -> None:
    run.mkdir(parents=True, exist_ok=True)
    known = {"token": "x", "host": "node7", "machine": "another", "pid": 1, "job": "70"}
    (run / "lock.json").write_text(json.dumps(known | facts))
    os.utime(run / "lock.json", (time.time() - age, time.time() - age))


def status(run: Path, state: str, step: int = 3, **facts) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "status.json").write_text(json.dumps({"state": state, "step": step, "steps": 6} | facts))


RUNNING, PENDING = Queued("71_0", "RUNNING"), Queued("71_0", "PENDING", "Resources")


@pytest.mark.parametrize(
    ("what", "queued", "queue", "expected"),
    [
        ("nothing", None, set(), "missing"),
        ("nothing", PENDING, {"70"}, "queued"),
        ("nothing", RUNNING, {"70"}, "running"),  # it is only beginning
        ("beats", RUNNING, {"70"}, "running"),
        ("beats", None, None, "running"),  # SLURM need not answer
        ("beats", None, set(), "killed"),  # its job has gone, whatever the heartbeat
        ("silent", None, None, "stale"),
        ("silent", RUNNING, {"70"}, "stale"),  # it hangs, or its node is gone
        ("silent", PENDING, {"70"}, "queued"),  # SLURM knows that the node is gone
        ("dead here", None, None, "killed"),
        ("silent", RUNNING, {"71"}, "running"),  # another job starts it again
        ("dead here", RUNNING, {"70"}, "running"),  # its job starts it again
        ("long dead here", RUNNING, {"70"}, "running"),
        ("interrupted", PENDING, {"70"}, "queued"),
        ("interrupted", None, set(), "interrupted"),  # until somebody gives the command again
        ("failed", None, set(), "failed"),
        ("finished", None, set(), "done"),
        ("finished short", None, set(), "failed"),  # more steps were asked for, and nobody makes them
    ],
)
def test_a_run_is_judged_by_its_directory_first_and_by_the_queue_second(tmp_path, what, queued, queue, expected):
    run = tmp_path / "otb-n4-seed0"
    if what == "beats":
        lock(run, age=STALE_AFTER_SECONDS / 10)
    if what == "silent":
        lock(run, age=STALE_AFTER_SECONDS * 10)
    if what.endswith("dead here"):
        lock(run, age=STALE_AFTER_SECONDS * 10 * what.startswith("long"), machine=machine(), pid=2**22 + 1)
    if what in ("beats", "silent", "dead here", "long dead here"):
        status(run, "running")
    if what in ("interrupted", "failed"):
        status(run, what, error="ValueError: x")
    if what.startswith("finished"):
        status(run, "finished", step=6 if what == "finished" else 4)
    assert state_of(Job(0, str(run), steps=6), queued, queue).state == expected


def test_a_run_of_long_steps_is_stale_only_after_ten_of_them(tmp_path):
    status(tmp_path, "running")
    rows = [{"step": step, "seconds_step": 60.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lock(tmp_path, age=400)  # more than STALE_AFTER_SECONDS
    found = state_of(Job(0, str(tmp_path), steps=6))
    assert (found.state, found.step, found.seconds_left) == ("running", 3, 180.0)
    lock(tmp_path, age=4000)
    assert state_of(Job(0, str(tmp_path), steps=6)).state == "stale"


def test_the_reason_of_a_run_is_its_error_or_its_last_line():
    assert (
        reason_in("training 1/6\nerror: seed=x must be whole.\nTry seed=0.\n") == "seed=x must be whole.\nTry seed=0."
    )
    assert reason_in("Traceback (most recent call last):\n  ...\nValueError: no\n\n") == "ValueError: no"
    assert reason_in("error: x=1 is odd.\nsrun: error: vm: task 0: Exited with exit code 2\n") == "x=1 is odd."
    assert reason_in("") == "it printed nothing"


def test_a_run_that_is_killed_again_and_again_is_given_up_unless_it_gets_on(tmp_path):
    job = Job(0, str(tmp_path))
    assert [may_restart(job, limit=2) for _ in range(3)] == [True, True, False]
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)
    assert may_restart(job, limit=2)


def test_a_folder_that_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(RunError, match="is no folder of a sweep"):
        load_jobs(tmp_path)
    command = [sys.executable, "-m", "slurm.status", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_a_folder_of_runs_lists_its_sweeps_with_the_command_for_one(tmp_path):
    for name in ("sweep-1", "sweep-2"):
        (tmp_path / name).mkdir()
        Job(0, str(tmp_path / "otb-n4-seed0"), steps=6).save(tmp_path / name)
    status(tmp_path / "otb-n4-seed0", "finished", step=6)
    command = [sys.executable, "-m", "slurm.status", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("1 done") == 2, done.stderr
    assert f"One of them: python -m slurm.status {tmp_path / 'sweep-'}" in done.stdout


def test_a_snapshot_is_the_code_with_its_commit_and_is_taken_once(tmp_path):
    first = take_snapshot(tmp_path)
    assert take_snapshot(tmp_path) == first and list(tmp_path.iterdir()) == [first]
    for name in ("experiments/run.py", "conf/config.yaml", "otb/training/trainer.py", "tests/support/parity_task.py"):
        assert (first / name).read_bytes() == (ROOT / name).read_bytes()
    code = "from experiments.running import environment as e; print(e.ROOT, e.commit(), len(e.working_tree_diff()))"
    variables = os.environ | {"PYTHONPATH": str(first)}
    said = subprocess.run([sys.executable, "-P", "-c", code], env=variables, capture_output=True, text=True)
    facts = json.loads((first / "snapshot.json").read_text())
    assert said.stdout.split() == [str(first), str(facts["commit"]), str(len(facts["diff"]))], said.stderr


def test_a_log_of_a_sweep_has_one_line_for_each_state_or_eighth_of_a_run(tmp_path, capsys):
    """The last step is that of the run that is done: its accuracy comes after the step's row."""
    seen = [("queued", 0, None), ("running", 0, None), ("running", 2, 0.5), ("running", 3, 0.5), ("running", 3, 0.5)]
    seen += [("running", 16, 0.5), ("running", 16, 0.75), ("done", 16, 0.75), ("done", 16, 0.75)]
    display = SweepDisplay()
    for state, step, accuracy in seen:
        run = RunState(tmp_path / "otb-n4-seed0", state, step, 16, accuracy, 0.0, None, "", False, "")
        display.show([run])
    assert [line.removeprefix("0: otb-n4-seed0: ") for line in capsys.readouterr().out.splitlines()] == [
        "queued",
        "running 0/16",
        "running 2/16  held-out accuracy 0.500",
        "done 16/16  held-out accuracy 0.750",
    ]
