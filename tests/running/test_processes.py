"""What cannot work on these processes, GPUs or samplers is refused before anything loads, with value, rule and fix."""

import importlib.util
import inspect
import os
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import training_args

from experiments.checks import check
from experiments.checks.machine import check_this_machine
from experiments.checks.trainer import FSDP2_KEYS
from experiments.run import refuse_other_processes
from experiments.running import devices
from experiments.running import processes as running
from experiments.running.command_line import SAID, say_once
from experiments.running.grpo_options import machine_options, sampling_limits
from experiments.running.policy import source_of
from otb.errors import RunError
from otb.records import RunDirectory
from tests.support.commands import run_command_line, run_light
from tests.support.recipes import composed


@pytest.fixture
def machine(monkeypatch):
    """A function that sets how many GPUs are visible and which packages are installed."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    installed = importlib.util.find_spec

    def set_up(gpus=0, packages=()):
        monkeypatch.setattr(devices, "visible_gpus", lambda: [str(number) for number in range(gpus)])
        missing = {"vllm", "deepspeed"} - set(packages)
        found = lambda name: None if name in missing else name in packages or installed(name)  # noqa: E731
        monkeypatch.setattr("importlib.util.find_spec", found)

    return set_up


REFUSED = {  # overrides -> (processes, GPUs, packages, what the message says)
    "parallel=zero3": (8, 8, (), "pip install -e '.[deepspeed]'"),
    "parallel=fsdp2": (1, 1, (), "Add gpus=8"),
    "parallel=fsdp2 baseline=otb_exact": (8, 8, (), "reads whole gradients"),
    "parallel=fsdp2 measure_gradient_noise=true model.rollouts_per_forward=4": (8, 8, (), "reads whole gradients"),
    "rollouts_by=vllm": (1, 1, (), "pip install -e '.[vllm]'"),
    "rollouts_by=vllm rollouts_by.tensor_parallel=3": (8, 8, ("vllm",), "divides the 8 processes"),
    "task=arithmetic_tools rollouts_by=vllm rollouts_by.tensor_parallel=2": (2, 2, ("vllm",), "with tools: processes"),
    "task=arithmetic_tools rollouts_by=vllm_server": (2, 2, ("vllm",), "as if every process had asked for as much"),
    "task=arithmetic_tools parallel=fsdp2": (2, 2, (), "rollouts_by=hf with tools: rollouts call Python a different"),
    "rollouts_by=vllm rollouts_by.memory_share=3": (1, 1, ("vllm",), "between 0 and 1"),
    "rollouts_by=vllm_server rollouts_by.timeout_s=abc": (
        1,
        1,
        ("vllm",),
        "positive number of seconds. Try rollouts_by.timeout_s=240",
    ),
    "rollouts_by=vllm_server rollouts_by.url=localhost": (1, 1, ("vllm",), "Try rollouts_by.url=http://localhost:8000"),
    "trainer.vllm_importance_sampling_mode=token_truncated": (1, 1, (), "Did you mean token_truncate?"),
    "trainer.vllm_importance_sampling_clip_max=-1": (1, 1, (), "must be a number >= 0"),
    "parallel=fsdp2 rollouts_by.rows=8": (8, 8, (), "gather weights together"),
    "rollouts_by.rows=0": (1, 1, (), "must be a whole number >= 1"),
    "gpus=0": (1, 1, (), "must be a whole number >= 1"),
    "geometric_ratio_band=[0.9,1.1]": (1, 1, (), "samples with the policy itself"),
    "rollouts_by=vllm geometric_ratio_band=[1.1,1.2]": (
        1,
        1,
        ("vllm",),
        "around 1. Use geometric_ratio_band='[0.99,1.01]', or geometric_ratio_band=null",
    ),
    "rollouts_by=vllm geometric_ratio_band=[0,1.1]": (1, 1, ("vllm",), "around 1"),
    "rollouts_by=vllm geometric_ratio_band=[0.9,1.1] trainer.vllm_importance_sampling_correction=false": (
        *(1, 1, ("vllm",)),
        "Use trainer.vllm_importance_sampling_correction=true, or geometric_ratio_band=null",
    ),
    "trainer.use_vllm=true": (1, 1, (), "set rollouts_by instead"),
    "trainer.fsdp=full_shard": (1, 1, (), "set parallel instead"),
    "model=hub": (1, 1, (), "Add model.name=OWNER/NAME"),
    "model.name=Qwen/Qwen2.5-7B": (1, 1, (), "Use model=hub model.name=Qwen/Qwen2.5-7B"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_work_is_refused(overrides, machine):
    processes, gpus, packages, says = REFUSED[overrides]
    machine(gpus, packages)
    words = [f"++{word}" if re.match(r"trainer\.", word) else word for word in overrides.split()]
    with pytest.raises(RunError, match=re.escape(says)):
        check(composed(*words), processes)


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [
        ("task=arithmetic_tools rollouts_by=vllm_server", 1),
        ("rollouts_by=vllm_server", 8),
        ("task=arithmetic_tools", 8),
        ("task=arithmetic_tools parallel=fsdp2 rollouts_by=vllm", 8),
        ("parallel=fsdp2", 8),
    ],
)
def test_samplers_that_tools_do_not_bring_out_of_step_are_taken(overrides, processes, machine):
    machine(8, ("vllm",))
    check(composed(*overrides.split()), processes)


def test_one_process_that_sees_several_gpus_is_refused_with_both_ways_out(machine):
    machine(gpus=4)
    with pytest.raises(RunError, match="gpus=4 for all of them, or CUDA_VISIBLE_DEVICES=0"):
        check(composed())
    machine(gpus=1)
    check(composed())
    machine(gpus=4)
    check(composed("++trainer.use_cpu=true"))


def test_sharding_without_a_gpu_is_refused_where_it_would_run_and_not_where_it_is_planned(machine):
    machine(gpus=0)
    check(composed("parallel=fsdp2"), processes=8)  # on a login node
    with pytest.raises(RunError, match="no GPU is to be used here"):
        check(composed("parallel=fsdp2"))


def test_vllm_without_a_gpu_is_refused_where_it_would_run_and_not_where_it_is_planned(machine):
    machine(gpus=0, packages=("vllm",))
    check(composed("rollouts_by=vllm"), processes=8)
    with pytest.raises(RunError, match="rollouts_by=vllm samples on the GPUs that train, and none is to be used here"):
        check(composed("rollouts_by=vllm"))


def test_gpus_starts_the_processes_by_torchrun(machine, monkeypatch):
    machine(gpus=8)
    started = []
    monkeypatch.setattr(running, "torchrun", lambda words: started.append(words) or 75)
    monkeypatch.setenv(SAID, "")  # taken back at the end
    with pytest.raises(SystemExit) as end:
        running.start_processes(composed("gpus=8"), "run.py", ["gpus=8", "seed=1"])
    assert started == [["--standalone", "--nproc-per-node", "8", "run.py", "gpus=8", "seed=1"]] and end.value.code == 75
    running.start_processes(composed(), "run.py", [])
    monkeypatch.setenv("WORLD_SIZE", "8")  # in the processes that were started
    running.start_processes(composed("gpus=8"), "run.py", ["gpus=8"])
    assert len(started) == 1
    monkeypatch.delenv("WORLD_SIZE")
    machine(gpus=2)
    with pytest.raises(RunError, match="Use gpus=2"):
        check_this_machine(composed("gpus=8"))


@pytest.mark.parametrize(
    ("codes", "code", "printed"),
    [
        ([0, 0], 0, False),
        ([2, 2], 2, False),
        ([-15, 2], 2, False),  # one refused, and torchrun ended the other
        ([75, 75], 75, False),
        ([2, 1], 1, True),
        ([-9, -15], 1, True),
    ],
)
def test_several_processes_end_with_the_code_of_those_that_said_why(codes, code, printed, monkeypatch, capsys):
    """What a crash or a kill was stands in torchrun's own report, which ends with no traceback."""
    assert torchrun_of(codes, monkeypatch) == code
    said = capsys.readouterr().err
    assert bool(said) == printed and "Traceback" not in said and ("pid: 1000" in said) == printed


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([75, 75], 75),
        ([-12, -15], 75),  # SIGUSR2: one did not listen yet, and torchrun ended the other
        ([-9, 75], 75),  # one was not done after another one's end
        ([-15, -15], 75),
        ([1, 75], 1),
        ([-11, -15], 1),
    ],
)
def test_several_processes_that_a_warning_ends_can_be_started_again(codes, code, monkeypatch):
    monkeypatch.setattr(running, "passes_on", lambda: True)
    monkeypatch.setattr(running, "received", lambda: True)
    assert torchrun_of(codes, monkeypatch) == code


def torchrun_of(codes: list[int], monkeypatch) -> int:
    """The exit code of torchrun where its processes end with these."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file="<N/A>")
        for rank, code in enumerate(codes)
        if code != 0
    }

    def run(words):
        if failures:
            raise ChildFailedError("run.py", failures)

    monkeypatch.setattr("torch.distributed.run.main", run)
    return running.torchrun(["run.py"])


def test_one_of_several_processes_says_why_they_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(SAID, str(tmp_path / "said"))
    say_once("error: the first")
    say_once("error: the second")
    monkeypatch.delenv(SAID)
    say_once("error: a process of its own")
    assert capsys.readouterr().err.splitlines() == ["error: the first", "error: a process of its own"]


def test_vllm_gets_the_context_that_the_task_needs_and_the_tokens_that_end_a_turn(machine):
    machine(gpus=1, packages=("vllm",))
    cfg = composed("rollouts_by=vllm", "rollouts_by.memory_share=0.4", "task=gsm8k")
    options = machine_options(cfg) | sampling_limits(cfg, longest_prompt=300, stop_token_ids=[7])
    assert options["vllm_max_model_length"] == 300 + cfg.task.max_completion_length
    assert options["generation_kwargs"] == {"stop_token_ids": [7]}
    assert (options["vllm_mode"], options["vllm_gpu_memory_utilization"]) == ("colocate", 0.4)
    assert machine_options(composed()) == sampling_limits(composed(), 300, [7]) == {}
    sharding = machine_options(composed("parallel=fsdp2"))
    assert sharding == OmegaConf.to_container(composed("parallel=fsdp2").parallel.trainer)


def test_the_keys_of_fsdp_config_are_those_that_transformers_reads():
    """A key that a newer transformers reads, and that neither set names, has to be allowed or left out here."""
    of_version_1 = {"forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states"}
    of_version_1 |= {"limit_all_gathers"}
    source = inspect.getsource(training_args)
    read = set(re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', source))
    assert FSDP2_KEYS | of_version_1 == {key for key in read if not key.startswith("xla")}


def test_what_the_processes_would_refuse_is_said_once_before_they_start(tmp_path):
    given = ["gpus=2", "trainer.use_cpu=true", "parallel=fsdp2", "baseline=otb_exact", f"runs_dir={tmp_path}"]
    done = run_light(given)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    assert "reads whole gradients" in done.stderr


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        ("run", ["task=math500"], "task math500 has train_split=null"),
        ("evaluate", ["k=0"], "k=0 must be a whole number >= 1"),
        ("evaluate", ["rollouts_by.rows=8"], "Use rollouts_per_batch=8"),
    ],
)
def test_each_command_checks_before_it_starts_its_processes(script, given, said):
    done = run_light(["gpus=2", "trainer.use_cpu=true", *given], script=script)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr


def test_what_only_the_processes_can_refuse_is_said_by_one_of_them_without_a_traceback(tmp_path):
    """Both of them find no weights there; torchrun would end with 1 and a traceback of its own."""
    given = ["gpus=2", "trainer.use_cpu=true", f"checkpoint={tmp_path}", f"evaluations_dir={tmp_path / 'found'}"]
    done = run_command_line(given, script="evaluate", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: checkpoint={tmp_path} holds no *.safetensors")


def test_the_form_of_several_nodes_asks_slurm_for_a_process_per_gpu_on_each(tmp_path):
    programs = {"sbatch": "echo Submitted batch job 7", "srun": "exit 1", "squeue": "exit 1", "scontrol": "exit 1"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = ["-m", "hydra/launcher=slurm_nodes", "hydra.launcher.nodes=4", "wait=false", "sweep=large"]
    given += [f"runs_dir={tmp_path}", "parallel=fsdp2", "model=qwen2.5-7b", "task=gsm8k"]
    done = run_light(given, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "1 of 1 runs submitted as job 7" in done.stdout, done.stdout + done.stderr
    (sent,) = (tmp_path / "large" / "logs").glob("*_submission.sh")
    assert {
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=512GB",
        "#SBATCH --signal=USR2@1800",
    } <= set(sent.read_text().splitlines())


@pytest.mark.parametrize(
    ("processes", "overrides", "says"),
    [
        (2, (), None),
        (4, (), "is at step 6 with 2 processes and parallel=ddp, and would go on with 4 and parallel=ddp"),
        (2, ("parallel=zero3",), "would go on with 2 and parallel=zero3"),
    ],
)
def test_a_run_goes_on_with_the_processes_and_the_sharding_of_its_checkpoint(tmp_path, processes, overrides, says):
    directory = RunDirectory(tmp_path)
    directory.checkpoint(6).mkdir(parents=True)
    OmegaConf.save(composed(), directory.config_file)
    directory.environment_file.write_text('{"processes": 2}')
    if says is None:
        return refuse_other_processes(directory, composed(*overrides), processes)
    with pytest.raises(RunError, match=re.escape(says)) as refused:
        refuse_other_processes(directory, composed(*overrides), processes)
    assert "Use gpus=2 parallel=ddp (on SLURM as many tasks), or overwrite=true" in str(refused.value)


def test_a_run_without_a_checkpoint_may_begin_anew_with_other_processes(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.checkpoints.mkdir()
    OmegaConf.save(composed(), directory.config_file)
    directory.environment_file.write_text('{"processes": 2}')
    refuse_other_processes(directory, composed("parallel=fsdp2"), 8)
    directory.checkpoint(2).mkdir()
    directory.environment_file.write_text("{}")  # of a version that did not note the processes
    refuse_other_processes(directory, composed(), 8)


def test_vllm_and_the_reference_model_load_the_revision_from_a_copy_of_it(tmp_path, monkeypatch):
    """TRL knows both by a name alone, of which they would take the newest revision."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for commit, branch in (("1" * 40, "main"), ("2" * 40, "v1")):
        snapshot = tmp_path / "models--someone--model" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        reference = tmp_path / "models--someone--model" / "refs" / branch
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(commit)
    cfg = composed("rollouts_by=vllm", "model=hub", "model.name=someone/model", "model.revision=v1")
    assert source_of(cfg, "someone/model") == str(snapshot)
    assert source_of(cfg, str(tmp_path)) == str(tmp_path)  # a folder has no revisions
    assert source_of(composed("model.revision=v1"), "someone/model") == "someone/model"
    assert source_of(composed("rollouts_by=vllm"), "someone/model") == "someone/model"
    near = composed("model=hub", "model.name=someone/model", "model.revision=v1", "++trainer.beta=0.01")
    assert source_of(near, "someone/model") == str(snapshot)
    near.trainer.beta = 0.0
    assert source_of(near, "someone/model") == "someone/model"
    cfg.model.revision = "v2"
    with pytest.raises(RunError, match="python experiments/prefetch.py --model someone/model --revision v2"):
        source_of(cfg, "someone/model")


@pytest.mark.parametrize(
    ("flags", "emulated"),
    [
        ("fma avx512f avx512_bf16", False),
        ("fma avx512f avx2", True),
        ("fp asimd bf16", False),
        ("amx_tile amx_bf16", False),
    ],
)
def test_bfloat16_that_the_processor_only_emulates_is_said_and_not_changed(tmp_path, monkeypatch, flags, emulated):
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    assert devices.emulated_bfloat16("bfloat16", on_cpu=True) == ""  # nothing is known
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert bool(devices.emulated_bfloat16("bfloat16", on_cpu=True)) == emulated
    assert devices.emulated_bfloat16("bfloat16", on_cpu=False) == devices.emulated_bfloat16("float32", True) == ""


# ---- a vLLM server is waited for before anything loads


class Answers(BaseHTTPRequestHandler):
    """Answers 503 as often as `server.busy` says, then 200, and keeps what was asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(200 if len(self.server.asked) > self.server.busy else 503)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    """A server that runs in a thread."""
    with HTTPServer(("127.0.0.1", 0), Answers) as made:
        made.asked, made.busy = [], 0
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def of_server(url, timeout_s):
    return composed("rollouts_by=vllm_server", f"rollouts_by.url={url}", f"rollouts_by.timeout_s={timeout_s}")


def test_a_server_that_answers_is_not_waited_for_and_one_that_starts_is(server, capsys, monkeypatch):
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    url = f"http://127.0.0.1:{server.server_port}"
    running.wait_for_server(of_server(f"{url}/", 60))
    assert server.asked == ["/health"] and capsys.readouterr().err == ""
    server.asked, server.busy = [], 2
    running.wait_for_server(of_server(url, 60))
    assert len(server.asked) == 3
    assert capsys.readouterr().err == f"waiting up to 60 s for the vLLM server at {url}\n"


def test_a_server_that_is_not_there_is_told_before_the_model_loads(server, machine):
    server.shutdown()
    url = f"http://127.0.0.1:{server.server_port}"
    server.server_close()
    machine(1, ("vllm",))
    with pytest.raises(RunError, match=f"rollouts_by.url={url} gave no answer .*trl vllm-serve --model tiny"):
        check(of_server(url, 0.01))
    running.wait_for_server(composed())  # where no server samples
