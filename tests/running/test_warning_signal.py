"""A run that a cluster warns, or that gets a first Ctrl-C, writes a checkpoint at the next boundary and ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from experiments.run import note_failure
from experiments.running import warning_signal
from otb.errors import STOPPED_FROM_KEYBOARD, TRY_AGAIN
from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import ROOT, arguments, rows, the_run, without_times
from tests.support.holds import Hold
from tests.support.waiting import PATIENCE_SECONDS, wait_for


@pytest.mark.parametrize(
    ("number", "changed"),
    [(signal.SIGUSR2, {}), (signal.SIGTERM, {"trainer__num_iterations": 2})],
    ids=["time limit", "preemption in the middle of a generation cycle"],
)
def test_a_warned_run_stops_at_a_checkpoint_and_goes_on_without_loss(policy, tmp_path, number, changed):
    log, given = tmp_path / "log", dict(model__name=policy, checkpoint_every=0, evaluation__every=0, **changed)
    hold = Hold(tmp_path / "hold", "row 1")
    process = commands.start(arguments(tmp_path / "warned", **given), log, SLURM_JOB_ID="7", **hold.environment)
    hold.wait(process)
    os.kill(process.pid, number)
    commands.join(process)
    run = RunDirectory(the_run(tmp_path / "warned"))
    (reached,) = run.checkpoint_steps()
    assert process.exitcode == TRY_AGAIN and f"checkpoint written at step {reached}; the same" in log.read_text()
    assert 0 < reached < 6 and reached % changed.get("trainer__num_iterations", 1) == 0
    assert (run.status()["state"], run.status()["step"]) == ("interrupted", reached)
    assert not (run.path / "lock.json").exists()
    code, printed = commands.run(
        arguments(tmp_path / "warned", **given), log, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1"
    )
    assert code == 0 and f"resuming at step {reached}\n" in printed
    printed = commands.done(arguments(tmp_path / "whole", **given), log)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_times(run.path / name) == without_times(the_run(tmp_path / "whole") / name)
    assert not run.discarded_file.exists()


def test_the_first_ctrl_c_writes_a_checkpoint_and_the_same_command_goes_on_without_loss(policy, tmp_path):
    log, given = tmp_path / "log", dict(model__name=policy, checkpoint_every=0, evaluation__every=0)
    hold = Hold(tmp_path / "hold", "row 2")
    process = commands.start(arguments(tmp_path / "runs", **given), log, **hold.environment)
    hold.wait(process)
    os.kill(process.pid, signal.SIGINT)
    commands.join(process)
    assert process.exitcode == STOPPED_FROM_KEYBOARD
    assert f"\n{warning_signal.STOPPING}\n" in log.read_text()
    assert "stopped; checkpoint written at step 2; the same command goes on" in log.read_text()
    run = RunDirectory(the_run(tmp_path / "runs"))
    assert run.checkpoint_steps() == [2] and not (run.path / "lock.json").exists()
    status = run.status()
    assert (status["state"], status["step"], status["error"]) == ("interrupted", 2, "stopped from the keyboard")
    code, printed = commands.run(arguments(tmp_path / "runs", **given), log)
    assert code == 0 and "resuming at step 2\n" in printed and not run.discarded_file.exists()


def test_a_second_ctrl_c_ends_the_run_at_once(monkeypatch, capfd):
    for name in ("_received", "_from_keyboard"):
        monkeypatch.setattr(warning_signal, name, threading.Event())
    with pytest.raises(KeyboardInterrupt), warning_signal.finishing_the_step(say=True):
        os.kill(os.getpid(), signal.SIGINT)
        assert warning_signal.received() and capfd.readouterr().err == f"\n{warning_signal.STOPPING}\n"
        stop = warning_signal.interruption(3)
        assert (str(stop), stop.code) == ("stopped; checkpoint written at step 3", STOPPED_FROM_KEYBOARD)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_training_notes_that_the_run_was_interrupted(tmp_path):
    directory = RunDirectory(tmp_path)
    note_failure(directory, 6, KeyboardInterrupt())
    assert (directory.status()["state"], directory.status()["error"]) == ("interrupted", "stopped from the keyboard")
    note_failure(directory, 6, ValueError("no"))
    assert (directory.status()["state"], directory.status()["error"]) == ("failed", "ValueError: no")


def test_outside_of_slurm_sigterm_ends_a_run_at_once(policy, tmp_path):
    hold = Hold(tmp_path / "hold", "row 1")
    process = commands.start(arguments(tmp_path / "runs", model__name=policy), tmp_path / "log", **hold.environment)
    hold.wait(process)
    process.terminate()
    commands.join(process)
    assert process.exitcode == -signal.SIGTERM


def test_a_warning_reaches_the_processes_that_a_run_has_started(policy, tmp_path):
    """The cluster knows of the one alone that has started them by torchrun, which would end at it, and end them."""
    given = dict(model__name=policy, gpus=2, trainer__use_cpu="true", checkpoint_every=0, evaluation__every=0)
    first, printed = warned(tmp_path, signal.SIGUSR2, 0, given)
    assert printed.count(f"checkpoint written at step {first}; the same command goes on") == 1
    second, printed = warned(tmp_path, signal.SIGTERM, first, given)
    assert second > first and f"resuming at step {first}\n" in printed
    third, printed = warned(tmp_path, signal.SIGINT, second, given, STOPPED_FROM_KEYBOARD, job="")
    assert third > second and printed.count(f"stopped; checkpoint written at step {third}; the same command") == 1
    assert printed.count(warning_signal.STOPPING) == 1


def warned(
    folder: Path, number: signal.Signals, after: int, given: dict, code: int = TRY_AGAIN, job: str = "7"
) -> tuple[int, str]:
    """Sends a signal to `python experiments/run.py` after a step -> the step of its checkpoint, what it printed.

    code: the exit code to expect. job: the SLURM job that the command runs in; "" for none.
    """
    log, metrics = folder / "log", "*/*/metrics.jsonl"
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments(folder / "runs", **given, steps=9999)]
    with open(log, "w") as output:
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | ({"SLURM_JOB_ID": job} if job else {})
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    wait_for(lambda: any(len(rows(file)) > after for file in (folder / "runs").glob(metrics)), process)
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == code, log.read_text()
    run = RunDirectory(the_run(folder / "runs"))
    (reached,) = run.checkpoint_steps()[-1:]
    assert (run.status()["state"], run.status()["step"]) == ("interrupted", reached)
    assert [row["step"] for row in rows(run.metrics_file)] == list(range(1, reached + 1))
    return reached, log.read_text()
