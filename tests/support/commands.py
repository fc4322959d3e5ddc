"""Runs the real commands `run.py`, `variance.py` and `evaluate.py` of experiments/ in processes that tests may kill.

The processes are forked from a server that has imported torch: importing takes seconds, and a test that kills a run
twenty times would pay for it twenty times.
"""

import ast
import atexit
import ctypes
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from tests.support import economy, holds, sharding
from tests.support.waiting import PATIENCE_SECONDS, wait_for

__all__ = ["ROOT", "arguments", "rows", "run", "run_command_line", "start", "the_run", "wait_for", "without_times"]

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = [
    "experiments.run",
    "experiments.running.train",
    "experiments.running.summary",
    "experiments.variance",
    "experiments.measuring.laboratory",
    "analysis.run_picture",
    "experiments.evaluate",
    "experiments.evaluation.evaluator",
    "experiments.evaluation.accuracy_table",
    "experiments.running.make_policy",
    "tests.support.parity_task",
    "tests.support.commands",
    "tests.support.fork_server",  # the last one
]
HEAVY = {"torch", "transformers", "trl", "pandas", "matplotlib", "scipy", "pyarrow", "jinja2"}  # up to seconds each
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)

# A run of a few fast steps that passes through everything a run does.
SHORT_RUN = {
    "task._target_": "tests.support.parity_task.Parity",
    "task.train_prompts": 10,  # 4 a step: the third step is in the second epoch
    "task.eval_prompts": 4,
    "task.max_completion_length": 6,
    "prompts_per_step": 4,
    "group_size": 2,
    "steps": 6,
    "evaluation.every": 2,
    "evaluation.samples": 2,
    "checkpoint_every": 2,
    "rollouts.every": 2,
    "learning_rate": 1e-3,
}


def arguments(runs_dir: Path, **changed) -> list[str]:
    """Returns the command-line arguments of a short run. changed: keys with `__` for a dot; None drops a key."""
    values = SHORT_RUN | {"runs_dir": runs_dir} | {key.replace("__", "."): value for key, value in changed.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def start(
    given: list[str],
    log: Path,
    limit: int | None = None,
    script: str = "run",
    cpu_seconds: float | None = None,
    quick: bool = True,
    **environment,
) -> multiprocessing.Process:
    """Starts `experiments/SCRIPT.py` in a separate process and sends its output to `log`.

    limit: the largest file that it may write, in bytes, like a full disk. It obeys file modes even if root runs it.
    cpu_seconds: the CPU time after which SIGPROF kills it. `cpu_seconds(log)` returns the time until its end.
    quick: files of figures stay empty (rendering takes a fifth of a short run), nothing waits for the disk, and
    pools fork their processes from the command, because spawned ones would each import torch.
    """
    options = {"limit": limit, "cpu_seconds": cpu_seconds, "quick": quick, "environment": environment}
    process = context.Process(target=_command, args=(script, given, str(log)), kwargs=options)
    process.start()
    return process


def start_two(given: list[str], log: Path, **options) -> list[multiprocessing.Process]:
    """Starts two processes that train one run, as torchrun does; rank r prints into LOG.r."""
    return [
        start(given, Path(f"{log}.{rank}"), **options, **variables) for rank, variables in enumerate(of_two_processes())
    ]


def of_two_processes() -> list[dict[str, str]]:
    """Returns the environment variables that torchrun sets for each of two processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def run_module_by_two(module: str, given: list[str], log: Path) -> None:
    """Runs `python -m MODULE` in two processes to their end. Raises AssertionError if one of them fails."""
    files = [Path(f"{log}.{rank}") for rank in (0, 1)]
    started = [
        context.Process(target=_module, args=(module, given, str(file), variables))
        for file, variables in zip(files, of_two_processes(), strict=True)
    ]
    for process in started:
        process.start()
    codes = [None, None]

    def over() -> bool:  # or one has failed, for which the other might wait for ever
        codes[:] = [process.exitcode for process in started]
        return None not in codes or any(codes)

    wait_for(over)
    for process in started:
        process.kill()
        join(process)
    assert codes == [0, 0], "".join(file.read_text()[-3000:] for file in files)


def run_two(given: list[str], log: Path, **options) -> list[tuple[int, str]]:
    """Runs `start_two` to its end. -> exit code and output of each process."""
    started = start_two(given, log, **options)
    for process in started:
        join(process)
    return [(process.exitcode, Path(f"{log}.{rank}").read_text()) for rank, process in enumerate(started)]


def run(given: list[str], log: Path, **options) -> tuple[int, str]:
    """Runs the command to its end. -> exit code and the output of this call."""
    before = log.stat().st_size if log.exists() else 0
    process = start(given, log, **options)
    join(process)
    return process.exitcode, log.read_bytes()[before:].decode()


def done(given: list[str], log: Path, **options) -> str:
    """Does `run` and returns the output. Raises AssertionError if the command fails."""
    code, printed = run(given, log, **options)
    assert code == 0, printed
    return printed


def join(process: multiprocessing.Process) -> None:
    """Waits for the end of the process. Raises AssertionError if it does not end."""
    process.join(PATIENCE_SECONDS)
    assert process.exitcode is not None, f"the command did not end within {PATIENCE_SECONDS:g} s"


@atexit.register
def end_what_a_failed_test_left() -> None:
    """Kills runs that nobody released; they would keep the test session from ending."""
    for process in multiprocessing.active_children():
        process.kill()


def cpu_seconds(log: Path) -> float:
    """Returns the CPU time of the last command with this log, if it reached its end."""
    return float(Path(f"{log}.cpu_seconds").read_text())


def kill(process: multiprocessing.Process) -> None:
    """Sends SIGKILL and waits until the process is gone."""
    os.kill(process.pid, signal.SIGKILL)
    join(process)


def kill_at(moment: str, given: list[str], log: Path, folder: Path, **options) -> None:
    """Runs the command and kills it at a moment of tests/support/holds.py. folder: for files that both exchange."""
    hold = holds.Hold(folder, moment)
    process = start(given, log, **options, **hold.environment)
    hold.wait(process)
    kill(process)


def run_command_line(
    given: list[str], cwd: Path = ROOT, script: str = "run", **environment
) -> subprocess.CompletedProcess:
    """Runs `python experiments/SCRIPT.py ...` as a user types it."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, str(ROOT / "experiments" / f"{script}.py"), *given]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def run_light(given: list[str], cwd: Path = ROOT, script: str = "run", **environment) -> subprocess.CompletedProcess:
    """Does `run_command_line` for a command that must be quick. Raises AssertionError if it imports one of HEAVY."""
    done = run_command_line(given, cwd, script, PYTHONPROFILEIMPORTTIME="1", **environment)
    lines = done.stderr.splitlines(keepends=True)
    imports = [line for line in lines if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in imports}
    assert "hydra" in modules, "nothing shows what was imported"
    assert not modules & HEAVY, modules & HEAVY
    done.stderr = "".join(line for line in lines if line not in imports)
    return done


def help_of(module: str) -> str:
    """Returns the output of `python -m MODULE --help`. Raises AssertionError if it fails or imports one of HEAVY."""
    code = f"import sys; from {module}.__main__ import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    printed, modules = done.stdout.rstrip().rsplit("\n", 1)
    assert done.returncode == 0 and not HEAVY & set(ast.literal_eval(modules)), done.stdout + done.stderr
    return printed


def _module(module: str, given: list[str], log: str, environment: dict[str, str]) -> None:
    print_into(log)
    os.environ.update(environment)
    sys.argv = [module, *given]
    runpy.run_module(module, run_name="__main__")


def print_into(log: str) -> None:
    """Appends all further output of this process to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _command(script: str, given: list[str], log: str, *, limit, cpu_seconds, quick, environment) -> None:
    print_into(log)
    os.environ.update(environment)
    obey_file_modes()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    holds.install()
    sharding.install()
    if quick:
        economy.do_not_sync()
        Figure.savefig = lambda figure, path, **options: Path(path).touch()
        multiprocessing.get_context = lambda method=None: multiprocessing.context.ForkContext()
    if cpu_seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF; its default action ends the process
    try:
        importlib.import_module(f"experiments.{script}").command_line(given)
    finally:
        Path(f"{log}.cpu_seconds").write_text(str(time.process_time()))


def obey_file_modes() -> None:
    """Drops CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which root ignores file modes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high words
    libc.capget(header, sets)
    for i in range(3):
        sets[i] &= ~0b110
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def the_run(runs_dir: Path) -> Path:
    """Returns the single run directory below `runs_dir`."""
    (config,) = Path(runs_dir).glob("*/*/config.yaml")
    return config.parent


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def without_times(file: Path) -> list[dict]:
    """Returns the rows of a metrics or evaluations file without values that differ between equal runs."""
    from otb.records.metric_names import TIME_AND_MEMORY

    return [{name: value for name, value in row.items() if name not in TIME_AND_MEMORY} for row in rows(file)]
