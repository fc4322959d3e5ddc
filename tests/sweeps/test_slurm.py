"""Sweeps on a real SLURM: whatever happens to a job, its run ends with the metrics of an undisturbed one."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from experiments.sweeps.snapshot import code_files
from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import ROOT, arguments, rows, without_times
from tests.support.holds import Hold
from tests.support.slurm_cluster import Cluster, job_files
from tests.support.waiting import wait_for

NODES, CPUS = 2, 4  # both nodes are this machine, with more CPUs than it may have: the runs mostly wait
LOOK = 0.3  # seconds between two looks at SLURM
SEEDS = (0, 1, 2)  # all of them are preempted first, and later
REQUEUED, KILLED_SUPERVISOR, KILLED = SEEDS
LIMITED = 4  # hits its time limit
# Warned a minute after its start or sooner, with ten minutes to write its checkpoint: enough on any machine.
LIMIT = ["hydra.launcher.timeout_min=11", "hydra.launcher.signal_delay_s=600"]
WITHOUT_GPUS = [  # of hydra/launcher=slurm_nodes, which has 8 GPUs and 8 processes a node
    "hydra.launcher.gpus_per_node=null",
    "hydra.launcher.tasks_per_node=1",
    "hydra.launcher.cpus_per_task=1",
    "hydra.launcher.mem_gb=1",
]
PROGRAMS = ("slurmctld", "slurmd", "munged")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        reason = f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
        if os.environ.get("OTB_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=NODES, cpus=CPUS // NODES)
    cluster.script("start")
    yield cluster
    cluster.script("stop")


@pytest.fixture(scope="module")
def sweeps(cluster, policy, tmp_path_factory) -> dict:
    """Sweeps that are sent all at once, so that they share the waiting; their runs are disturbed in turn.

    A run holds after its third step, and where it was disturbed there, once more after its fifth, until something has
    happened to it. -> runs_dir, and what was seen on the way.
    """
    runs_dir = tmp_path_factory.mktemp("slurm") / "runs"
    twice = Hold(runs_dir.parent / "hold", "row 3", "row 5")
    once = Hold(runs_dir.parent / "hold", "row 3")
    seen = {"runs_dir": runs_dir}

    def send(name: str, *given: str, into: Path = runs_dir, **extra: str):
        common = [f"model.name={policy}", "wait=false", f"sweep={name}"]
        seen[name] = cluster.sweep(into, *common, *given, **extra)
        # two runs of `mixed` are refused before anything is sent
        assert seen[name].returncode == (name == "mixed"), seen[name].stdout + seen[name].stderr
        return [RunDirectory(job["run"]) for job in job_files(into / name)]

    seeds = f"seed={','.join(map(str, SEEDS))}"
    runs = send("main", seeds, **twice.environment)
    names = [run.path.name for run in runs]
    seen["held"] = send_and_edit(cluster, policy, runs_dir)
    wait_for(lambda: twice.held().keys() >= set(names), every=LOOK)
    seen["preempted"] = preempt(cluster, runs)
    (runs_dir / "broken").touch()
    broken = {"OTB_TEST_FAILING_RANK": "1", "OTB_TEST_FAILING_FILE": str(runs_dir / "broken")}
    send("ranks", "steps=2", "seed=10", "hydra.launcher.tasks_per_node=2", **broken)
    send("nodes", "steps=2", "seed=10", *WITHOUT_GPUS, into=runs_dir / "nodes", launcher="slurm_nodes")
    send("limited", f"seed={LIMITED}", *LIMIT, **once.environment)
    send("mixed", "group_size=1", "task.train_prompts=10,2", "steps=1", "baseline=otb,grpo")
    (cancelled,) = send("cancelled", "seed=11", **once.environment)
    local, seen["local"] = start_locally(policy, runs_dir.parent / "local")
    seen["first"] = seen["main"].stdout
    send("main", seeds)

    def job(sweep: str, number: int = 0) -> dict:
        return job_files(runs_dir / sweep)[number]

    def requeue() -> None:
        cluster.script("restart-controller")
        seen["midway"] = cluster.status(runs_dir / "main")
        cluster.command("scontrol", "requeue", job("main", REQUEUED)["job"])
        twice.release(names[REQUEUED])

    def kill_supervisor() -> None:
        (supervisor,) = supervisors(runs_dir / "main", job("main", KILLED_SUPERVISOR))
        supervisor.kill()
        twice.release(names[KILLED_SUPERVISOR])

    def kill() -> None:
        os.kill(twice.held()[names[KILLED]], signal.SIGKILL)
        twice.release(names[KILLED])

    def send_ranks_again() -> None:
        seen["failed ranks"] = job("ranks")
        (runs_dir / "broken").unlink()
        seen["resubmitted"] = cluster.status(runs_dir / "ranks", "--resubmit")

    disturbances = [
        (lambda: names[REQUEUED] in twice.held(), requeue),
        (lambda: names[KILLED] in twice.held(), kill),
        (lambda: names[KILLED_SUPERVISOR] in twice.held(), kill_supervisor),
        (lambda: cancelled.path.name in once.held(), lambda: cluster.command("scancel", job("cancelled")["job"])),
        (lambda: job("ranks")["error"] and not in_queue(cluster, job("ranks")["job"]), send_ranks_again),
    ]
    disturb_in_turn(disturbances)
    wait_for(lambda: not cluster.queue(), every=LOOK)
    commands.join(local)
    assert local.exitcode == 0, (seen["local"] / "log").read_text()
    return seen


def disturb_in_turn(disturbances: list[tuple[Callable, Callable]]) -> None:
    """Does each of them, (whether its time has come, what to do), as soon as its time has come."""
    while disturbances:
        wait_for(lambda: any(ready() for ready, _ in disturbances), every=LOOK)
        ready, disturb = next(pair for pair in disturbances if pair[0]())
        disturb()
        disturbances.remove((ready, disturb))


def start_locally(policy: Path, folder: Path):
    """The runs that the disturbed ones must equal -> the process, runs_dir."""
    folder.mkdir()
    seeds = ",".join(map(str, (*SEEDS, LIMITED)))
    given = [*arguments(folder, model__name=policy), f"seed={seeds}", "-m", "hydra/launcher=basic"]
    return commands.start(given, folder / "log"), folder


def send_and_edit(cluster: Cluster, policy: Path, runs_dir: Path) -> str:
    """Sends a run from a copy of the project, and breaks the copy while it is in the queue -> what was printed."""
    project = runs_dir.parent / "project"
    for name in code_files():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    command = [sys.executable, str(project / "experiments" / "run.py"), "-m", "hydra/launcher=slurm_cpu", "steps=1"]
    command += ["task._target_=tests.support.parity_task.Parity", "task.eval_prompts=4", "wait=false", "sweep=held"]
    command += [f"model.name={policy}", f"runs_dir={runs_dir}", "task.max_completion_length=6"]
    command += ["+hydra.launcher.additional_parameters.hold=true"]
    sent = cluster.command(*command, PYTHONPATH=str(project))
    for name in ("experiments/run.py", "otb/training/trainer.py", "slurm/job.py"):
        (project / name).write_text("raise SystemExit('edited')\n")
    cluster.command("scontrol", "release", sent.split("as job ")[1].split(",")[0])
    return sent


def in_queue(cluster: Cluster, job: str) -> bool:
    return any(line.startswith(f"{job} ") for line in cluster.queue())


@pytest.fixture(scope="module")
def undisturbed(sweeps) -> Path:
    """The same runs on this machine, without SLURM -> runs_dir."""
    return sweeps["local"]


def preempt(cluster: Cluster, runs: list[RunDirectory]) -> list[tuple[int, list]]:
    """An urgent job takes all CPUs until the runs have left -> for each the step it came to, and its discarded rows."""
    done = runs[0].path.parents[2] / "preempted"
    wrap = f"--wrap=while [ ! -e {done} ]; do sleep 0.2; done"
    cluster.command("sbatch", "--partition=urgent", f"--ntasks={CPUS}", "--output=/dev/null", wrap)
    wait_for(lambda: all(run.status()["state"] == "interrupted" for run in runs), every=LOOK)
    preempted = [(run.status()["step"], rows(run.discarded_file)) for run in runs]
    done.touch()
    return preempted


def supervisors(folder: Path, job: dict) -> list[psutil.Process]:
    """The process in a SLURM job of this sweep that watches over the run."""
    array, index = job["job"].split("_")
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"slurm.job", str(folder)} <= set(process.info["cmdline"] or ())
        and process.environ().get("SLURM_ARRAY_JOB_ID") == array
        and process.environ().get("SLURM_ARRAY_TASK_ID") == index
    ]


def assert_equal_runs(disturbed: Path, undisturbed: Path) -> None:
    """Metrics, evaluations and prompts; times and memory aside."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_times(disturbed / name) == without_times(undisturbed / name)
    assert RunDirectory(disturbed).status()["state"] == "finished"


def the_run(runs_dir: Path, seed: int) -> RunDirectory:
    (path,) = runs_dir.glob(f"*/otb-n2-seed{seed}-*")
    return RunDirectory(path)


@pytest.mark.parametrize("seed", [*SEEDS, LIMITED])
def test_a_disturbed_run_ends_with_the_metrics_of_an_undisturbed_one(sweeps, undisturbed, seed):
    mine, other = the_run(sweeps["runs_dir"], seed), the_run(undisturbed, seed)
    assert_equal_runs(mine.path, other.path)
    starts = json.loads(mine.environment_file.read_text())["starts"]
    assert len(starts) >= 2, "it was not disturbed"


def test_a_preempted_run_wrote_a_checkpoint_at_the_next_boundary_and_lost_no_step(sweeps):
    assert sweeps["preempted"] == [(3, [])] * len(SEEDS)


def test_a_requeued_run_lost_no_step(sweeps):
    assert not rows(the_run(sweeps["runs_dir"], REQUEUED).discarded_file)


def test_a_run_at_its_time_limit_is_requeued_and_lost_no_step(sweeps):
    (job,) = job_files(sweeps["runs_dir"] / "limited")
    assert job["timeouts"] >= 1 and job["error"] is None
    assert not rows(the_run(sweeps["runs_dir"], LIMITED).discarded_file)


def test_a_killed_process_is_started_again_in_the_same_job(sweeps):
    job = job_files(sweeps["runs_dir"] / "main")[KILLED]
    assert (job["kills"], job["starts"]) == (1, 3)  # the second start came after the preemption


def test_a_sweep_submitted_twice_runs_once(sweeps):
    assert "3 of 3 runs submitted" in sweeps["first"] and "0 of 3 runs submitted" in sweeps["main"].stdout
    assert len(list((sweeps["runs_dir"] / "main" / "submissions").iterdir())) == 1


def test_status_shows_a_row_per_run_while_they_run_and_afterwards(cluster, sweeps):
    code, printed = sweeps["midway"]
    assert code == 0 and "running" in printed
    code, printed = cluster.status(sweeps["runs_dir"] / "main")
    assert code == 0
    for seed in SEEDS:
        assert f"otb-n2-seed{seed}" in printed
    assert "3 done" in printed and "6/6" in printed


def test_a_finished_sweep_is_not_sent_again(cluster, policy, sweeps):
    seeds = f"seed={','.join(map(str, SEEDS))}"
    done = cluster.sweep(sweeps["runs_dir"], f"model.name={policy}", "sweep=main", seeds)
    assert done.returncode == 0, done.stderr
    assert "0 of 3 runs submitted" in done.stdout and done.stdout.count("finished") == 3


def test_a_bad_configuration_fails_alone_with_its_reason_and_is_not_retried(cluster, sweeps):
    """One is refused before it is sent, one by its own process, when it has read its data."""
    assert "2 of 4 runs submitted" in sweeps["mixed"].stdout and "2 refused" in sweeps["mixed"].stdout
    folder = sweeps["runs_dir"] / "mixed"
    assert sorted(job["starts"] for job in job_files(folder)) == [0, 0, 1, 1]
    assert sum((job["error"] or "").endswith("Try prompts_per_step=2.") for job in job_files(folder)) == 1
    code, printed = cluster.status(folder, "--failed")
    assert code == 1 and "1 done, 3 failed" in printed
    assert "more than the 2 training prompts" in printed and "baseline grpo" in " ".join(printed.split())


def test_of_several_processes_the_one_that_failed_is_named_with_its_reason(sweeps):
    job = sweeps["failed ranks"]
    assert job["error"].startswith("rank 1 on ")
    assert job["error"].endswith(": ValueError: the reward of this rank is broken")
    assert job["starts"] == 1


def test_a_cancelled_job_is_not_requeued(cluster, sweeps):
    code, printed = cluster.status(sweeps["runs_dir"] / "cancelled")
    assert code == 1 and "1 interrupted" in printed and "cancelled?" in printed, printed
    (job,) = job_files(sweeps["runs_dir"] / "cancelled")
    assert job["starts"] == 1


def test_what_failed_can_be_sent_again_as_it_was_sent(cluster, sweeps):
    """Several processes train one run, once the cause has gone."""
    assert "1 runs submitted as job" in sweeps["resubmitted"][1]
    code, printed = cluster.status(sweeps["runs_dir"] / "ranks")
    assert code == 0 and "1 done" in printed, printed
    (job,) = job_files(sweeps["runs_dir"] / "ranks")
    assert json.loads(RunDirectory(job["run"]).environment_file.read_text())["processes"] == 2


def test_a_run_on_two_nodes_is_that_of_as_many_processes_on_one(sweeps):
    (job,) = job_files(sweeps["runs_dir"] / "nodes" / "nodes")
    (one_node,) = job_files(sweeps["runs_dir"] / "ranks")
    assert_equal_runs(Path(job["run"]), Path(one_node["run"]))
    facts = json.loads(RunDirectory(job["run"]).environment_file.read_text())
    assert facts["processes"] == 2


def test_two_hundred_runs_are_sent_as_one_array_without_torch(cluster, tmp_path):
    seeds = ",".join(map(str, range(50)))
    code = (
        "import sys; from experiments.run import command_line\n"
        "try: command_line(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules, 'trl' in sys.modules)"
    )
    words = ["-m", "hydra/launcher=slurm_cpu", "baseline=otb,grpo", "group_size=4,8", f"seed={seeds}", "wait=false"]
    words += [f"runs_dir={tmp_path}/runs", "+hydra.launcher.additional_parameters.hold=true", "sweep=large"]
    printed = cluster.command(sys.executable, "-c", code, *words)
    cluster.command("scancel", "--me")
    assert "200 of 200 runs submitted as job" in printed and printed.endswith("False False False\n")
    assert "," not in printed.split("as job ")[1].split(",")[0]


def test_queued_runs_use_the_code_that_was_submitted(cluster, sweeps):
    (job,) = job_files(sweeps["runs_dir"] / "held")
    assert "1 of 1 runs submitted" in sweeps["held"]
    assert RunDirectory(job["run"]).status()["state"] == "finished", job


def test_status_without_slurm_reads_the_run_directories(sweeps):
    """As on a machine that has no squeue."""
    command = [sys.executable, "-m", "slurm.status", str(sweeps["runs_dir"] / "main")]
    variables = os.environ | {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "3 done" in done.stdout, done.stderr
    assert "SLURM does not answer" in done.stdout
