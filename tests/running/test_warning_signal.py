"""A run that a cluster warns writes a checkpoint at the next boundary, and ends so that it is brought back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from otb.errors import TRY_AGAIN
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


def warned(folder: Path, number: signal.Signals, after: int, given: dict) -> tuple[int, str]:
    """Sends a signal to `python experiments/run.py` after a step -> the step of its checkpoint, what it printed."""
    log, metrics = folder / "log", "*/*/metrics.jsonl"
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments(folder / "runs", **given, steps=9999)]
    with open(log, "w") as output:
        variables = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7"}
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    wait_for(lambda: any(len(rows(file)) > after for file in (folder / "runs").glob(metrics)), process)
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == TRY_AGAIN, log.read_text()
    run = RunDirectory(the_run(folder / "runs"))
    (reached,) = run.checkpoint_steps()[-1:]
    assert (run.status()["state"], run.status()["step"]) == ("interrupted", reached)
    assert [row["step"] for row in rows(run.metrics_file)] == list(range(1, reached + 1))
    return reached, log.read_text()
