"""A command computes on one thread for small models, on the cores for others; runs side by side share them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from experiments.running import threads
from experiments.sweeps.local import LocalSweep
from otb.errors import RunError
from tests.support.commands import ROOT

TINY, REAL = 96, 576


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setenv(threads.CORES, "8")


def test_a_lone_run_of_a_real_model_takes_all_cores_and_one_of_a_small_model_takes_one(eight_cores):
    assert threads.threads("auto", REAL) == 8
    assert threads.threads("auto", TINY) == 1
    assert threads.threads(3, TINY) == threads.threads(3, REAL) == 3


def test_processes_of_a_run_and_runs_of_a_sweep_share_the_cores(eight_cores, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads.threads("auto", REAL) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert threads.threads("auto", REAL) == 1
    assert threads.share_of(3) == {threads.CORES: "2"}
    assert threads.share_of(100) == {threads.CORES: "1"}


def test_runs_of_a_local_sweep_are_given_their_share(eight_cores, monkeypatch, tmp_path):
    """Four places on a machine without GPUs: two cores each."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("experiments.sweeps.local.take_snapshot", lambda folder: ROOT)
    sweep = LocalSweep(tmp_path, [], parallel=4, max_restarts=0, overwrite=True)
    assert [place.environment[threads.CORES] for place in sweep.free] == ["2"] * 4


def test_whoever_sets_omp_num_threads_has_decided(monkeypatch):
    monkeypatch.delenv(threads.CORES, raising=False)
    assert threads.threads("auto", REAL) is None and threads.share_of(2) == {}
    assert threads.threads(2, REAL) == 2


@pytest.mark.parametrize(("siblings", "cores"), [({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, 2), ({}, 4)])
def test_cores_are_those_of_the_affinity_and_two_processors_of_a_core_count_once(siblings, cores, monkeypatch):
    """Processors 0, 1, 4, 5 of a machine of 8; without a word of the kernel's, each is a core."""

    def read_text(path):
        cpu = int(path.parts[-3].removeprefix("cpu"))
        if cpu not in siblings:
            raise FileNotFoundError(path)
        return siblings[cpu] + "\n"

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5})
    monkeypatch.setattr("pathlib.Path.read_text", read_text)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert threads.physical_cores() == cores


@pytest.mark.parametrize(("asked", "cores"), [("1", 1), ("1000", None)])
def test_a_job_of_slurm_takes_no_more_cores_than_it_asked_for(asked, cores, monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    here = threads.physical_cores()
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", asked)
    assert threads.physical_cores() == (cores or here)


@pytest.mark.parametrize("given", [None, "3"])
def test_commands_begin_with_one_thread_or_those_of_the_user(given):
    """The variables as a command leaves them for torch, which reads them when it is imported."""
    kept = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", threads.CORES)
    environment = {name: value for name, value in os.environ.items() if name not in kept}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if given is None else {"OMP_NUM_THREADS": given})
    program = f"import experiments.run, os; print([os.environ.get(name) for name in {kept}])"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    cores = str(threads.physical_cores())
    assert done.stdout.strip() == str(["1", threads.SPINS, cores] if given is None else ["3", None, None])


def test_threads_are_set_for_torch(eight_cores):
    before = torch.get_num_threads()
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=TINY))
    try:
        threads.use_threads(2, config)
        assert torch.get_num_threads() == 2
        threads.use_threads("auto", config)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "all"])
def test_threads_that_are_no_number_are_refused(value):
    with pytest.raises(RunError, match=f"threads={value} must be auto or a whole number >= 1. Try threads=auto"):
        threads.check_threads(OmegaConf.create({"threads": value}))
