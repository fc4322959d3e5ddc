"""hydra/launcher=local as a user types it: several runs at a time, killed and given again, from a copy of the code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.running.devices import visible_gpus
from experiments.running.run_lock import is_alive
from experiments.sweeps.jobs import Job
from experiments.sweeps.local import LocalSweep
from experiments.sweeps.preloaded import Preloaded
from experiments.sweeps.state import state_of
from otb.records import RunDirectory
from otb.records.lock_file import read_lock
from tests.support import commands
from tests.support.commands import ROOT, arguments, run_command_line, wait_for, without_times
from tests.support.economy import NO_PICTURES
from tests.support.holds import Hold
from tests.support.slurm_cluster import job_files
from tests.support.waiting import PATIENCE_SECONDS


def sweep(runs_dir: Path, policy: Path, *more: str, **environment):
    given = [*arguments(runs_dir, model__name=policy, steps=4), "-m", "hydra.launcher.parallel=2", *more]
    return run_command_line(given, **{NO_PICTURES: "1"}, **environment)


@pytest.fixture(scope="module")
def killed(policy, tmp_path_factory) -> tuple[Path, str]:
    """A sweep of two runs one of which is killed in its third step -> runs_dir, what was printed."""
    runs_dir = tmp_path_factory.mktemp("sweep") / "runs"
    given = [
        *arguments(runs_dir, model__name=policy, steps=4),
        "-m",
        "hydra.launcher.parallel=2",
        "seed=0,1",
        "sweep=s",
    ]
    hold = Hold(tmp_path_factory.mktemp("hold"), "row 3")
    variables = os.environ | {"PYTHONPATH": str(ROOT), NO_PICTURES: "1"} | hold.environment
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *given]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: len(job_files(runs_dir / "s")) == 2, process)  # they are written side by side
    run = hold.wait(process, Path(job_files(runs_dir / "s")[1]["run"]).name)
    os.kill(run, signal.SIGKILL)
    hold.release()  # the other run, and this one when it is there again
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    return runs_dir, printed


def test_a_killed_run_of_a_local_sweep_is_started_again_and_loses_nothing(killed, policy, tmp_path):
    runs_dir, printed = killed
    assert [job["starts"] for job in job_files(runs_dir / "s")] == [1, 2]
    assert "1: otb-n2-seed1: done 4/4" in printed and "0: otb-n2-seed0: done 4/4" in printed
    lines = printed.splitlines()
    assert lines[0] == f"sweep: {runs_dir / 's'}"
    assert lines[-3:-1] == [
        f"report: python -m analysis.report {runs_dir / 's'}",
        f"status: python -m slurm.status {runs_dir / 's'}",
    ]
    commands.done(arguments(tmp_path / "alone", model__name=policy, steps=4, seed=1), tmp_path / "log")
    (alone,) = (tmp_path / "alone").glob("*/*/metrics.jsonl")
    (resumed,) = runs_dir.glob("*/*seed1*/metrics.jsonl")
    assert without_times(resumed) == without_times(alone)


def test_the_same_local_sweep_again_starts_nothing(killed, policy):
    runs_dir, _ = killed
    before = {path: path.stat().st_mtime_ns for path in runs_dir.glob("*/*/*.json*")}
    done = sweep(runs_dir, policy, "seed=0,1", "sweep=s")
    assert done.returncode == 0 and done.stdout.count("finished") == 2, done.stderr
    assert {path: path.stat().st_mtime_ns for path in runs_dir.glob("*/*/*.json*")} == before


def test_a_run_of_a_local_sweep_that_fails_fails_alone(policy, tmp_path):
    done = sweep(tmp_path / "runs", policy, "group_size=1", "baseline=otb,grpo", "task.train_prompts=10,2")
    assert done.returncode == 1
    assert done.stdout.count("failed: ") == 3 and done.stdout.count(": done 4/4") == 1
    assert "more than the 2 training prompts" in done.stderr and "Traceback" not in done.stderr


def test_a_sweep_without_a_run_that_can_start_is_refused_as_one(policy, tmp_path):
    for given, reason in (
        (["group_size=0", "seed=0,1"], "group_size=0 must be a whole number >= 1.*The other 1 runs are refused, too"),
        (["steps=2,0"], r"runs 0 and 1 of the sweep are both .* what they differ in \(steps=0\) makes no other run"),
    ):
        done = sweep(tmp_path / "runs", policy, *given)
        assert done.returncode == 2 and re.search(reason, done.stderr.replace("\n", " ")), done.stderr
        assert "accuracy" not in done.stdout and not list((tmp_path / "runs").glob("**/*.json"))


def test_waiting_for_nothing_is_refused_where_no_queue_keeps_the_runs(policy, tmp_path):
    done = sweep(tmp_path / "runs", policy, "wait=false")
    assert done.returncode == 2 and "error: wait=false needs a queue" in done.stderr
    done = sweep(tmp_path / "runs", policy, "hydra.launcher.parallel=0")
    assert done.returncode == 2 and "hydra.launcher.parallel=0 must be a whole number of at least 1" in done.stderr


def test_a_warned_local_sweep_stops_its_runs_at_checkpoints_and_goes_on_without_loss(killed, policy, tmp_path):
    hold, environment = Hold(tmp_path / "hold", "row 3"), {"SLURM_JOB_ID": "7", NO_PICTURES: "1"}
    given = [*arguments(tmp_path / "runs", model__name=policy, steps=4, checkpoint_every=0, evaluation__every=0), "-m"]
    given += ["hydra.launcher.parallel=2", "seed=0,1,2", "sweep=s"]
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *given]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment | hold.environment
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: len(hold.held()) == 2, process)
    process.send_signal(signal.SIGUSR2)
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, printed
    assert "a warning signal came; the runs that were under way have written checkpoints; the same command" in printed
    runs = [RunDirectory(job["run"]) for job in job_files(tmp_path / "runs" / "s")]
    assert [run.checkpoint_steps() for run in runs] == [[3], [3], []]
    assert [run.status().get("state") for run in runs] == ["interrupted", "interrupted", None]
    again = run_command_line(given, **environment)
    assert again.returncode == 0 and again.stdout.count(": done 4/4") == 3, again.stdout
    (alone,) = killed[0].glob("*/*seed1*/metrics.jsonl")
    assert without_times(runs[1].metrics_file) == without_times(alone)


def test_the_first_ctrl_c_of_a_local_sweep_lets_its_runs_write_checkpoints(policy, tmp_path):
    hold = Hold(tmp_path / "hold", "row 3")
    given = [*arguments(tmp_path / "runs", model__name=policy, steps=4, checkpoint_every=0, evaluation__every=0), "-m"]
    given += ["hydra.launcher.parallel=2", "seed=0,1,2", "sweep=s"]
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *given]
    variables = os.environ | {"PYTHONPATH": str(ROOT), NO_PICTURES: "1"} | hold.environment
    with open(tmp_path / "log", "w") as log:  # a group of its own, as a terminal gives to a command
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    wait_for(lambda: len(hold.held()) == 2, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130
    printed = (tmp_path / "log").read_text()
    assert "stopping: each run writes a checkpoint after its step; Ctrl-C again ends them at once\n" in printed
    runs = [RunDirectory(job["run"]) for job in job_files(tmp_path / "runs" / "s")]
    assert [run.checkpoint_steps() for run in runs] == [[3], [3], []]
    states = [state_of(Job(number, str(run.path), steps=4)).state for number, run in enumerate(runs)]
    assert states == ["interrupted", "interrupted", "missing"]


def test_starts_of_a_run_know_their_sweep_and_a_requeued_job_is_one_sweep(tmp_path, monkeypatch):
    """By it a run knows whether overwrite=true was obeyed."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("OTB_SWEEP", raising=False)

    def name() -> str:
        return LocalSweep(tmp_path, [], parallel=1, max_restarts=3, overwrite=True).environment["OTB_SWEEP"]

    assert name() and name() != name()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert name() == name() == "7"


def test_a_preloaded_process_does_one_run_after_the_other(policy, tmp_path):
    """Refused, stopped, refused again: each has its own exit code and log. One that is killed is replaced."""
    server = Preloaded(ROOT, {**os.environ, "PYTHONPATH": str(ROOT), NO_PICTURES: "1"})
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    server.start(["group_size=0"], {}, logs[0])
    first = server.process.pid
    assert server.wait(PATIENCE_SECONDS) == 2 and server.poll() == 2
    assert "group_size=0 must be" in logs[0].read_text()

    server.start(arguments(tmp_path / "runs", model__name=policy, steps=1000), {}, logs[1])
    wait_for(lambda: list((tmp_path / "runs").glob("*/*/metrics.jsonl")))
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    server.terminate()
    assert server.wait(PATIENCE_SECONDS) == -signal.SIGTERM

    server.start(["baseline.kind=?"], {}, logs[2])
    assert server.wait(PATIENCE_SECONDS) == 2 and server.process.pid == first
    assert "baseline.kind" in logs[2].read_text() and "group_size" not in logs[2].read_text()
    again = arguments(tmp_path / "again", model__name=policy, steps=1000)
    server.start(again, {}, logs[2])
    wait_for(lambda: list((tmp_path / "again").glob("*/*/metrics.jsonl")))
    (lock,) = (tmp_path / "again").glob("*/*/lock.json")
    server.process.kill()  # the run ends with it, and another process takes its place
    assert server.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    wait_for(lambda: not is_alive(read_lock(lock), 0.0))
    server.start(["group_size=0"], {}, logs[0])
    assert server.wait(PATIENCE_SECONDS) == 2 and server.process.pid != first
    server.close()
    assert server.process.wait(PATIENCE_SECONDS) == 0


def test_runs_of_one_preloaded_process_share_no_random_state():
    """Two forks draw other numbers, and name cached files of functions without a hash otherwise."""
    program = """
import os
from experiments.sweeps import preloaded
preloaded.import_all()
for _ in range(2):
    if os.fork() == 0:
        preloaded.reseed()
        import random, numpy, datasets.fingerprint
        print(random.random(), numpy.random.rand(), datasets.fingerprint.generate_random_fingerprint(), flush=True)
        os._exit(0)
    os.wait()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    first, second = (line.split() for line in done.stdout.splitlines())
    assert len({*first, *second}) == 6, done.stderr


def test_runs_get_one_gpu_each_of_those_that_are_visible(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\necho 'GPU 1: NVIDIA H200'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert visible_gpus() == ["0", "1"]
