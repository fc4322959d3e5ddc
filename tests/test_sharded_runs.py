"""A run that is sharded over two processes: killed and resumed it is the uninterrupted one; its best can be read."""

import os
import subprocess
import sys

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.run_trainer import RESUME_FILES
from tests.support.commands import ROOT, arguments, the_run, without_times
from tests.support.holds import Hold
from tests.support.waiting import PATIENCE_SECONDS, wait_for


def start(python, given, log, **environment):
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.sharded_run", *given, "model.dtype=bfloat16"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    with open(log, "ab") as output:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output)


def kill(process):
    """SIGKILL for torchrun and all its processes at once."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait()


def run(python, given, log):
    process = start(python, given, log)
    assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()[-3000:]


RUNS = {
    "fsdp2": ["parallel=fsdp2"],
    "fsdp2 in one file, lora": [
        "parallel=fsdp2",
        "parallel.trainer.fsdp_config.state_dict_type=FULL_STATE_DICT",
        "model.lora.r=4",
    ],
    "zero3": ["parallel=zero3"],
    "zero3, lora": ["parallel=zero3", "model.lora.r=4"],
}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.needs_vllm if "zero3" in n else ()) for n in RUNS]
)
def two_runs(request, policy, tmp_path_factory):
    """Run directories of a run that was left alone, and of one that was killed after its third step."""
    python = request.getfixturevalue("vllm_python") if "zero3" in request.param else sys.executable
    folder, sharding = tmp_path_factory.mktemp("runs"), RUNS[request.param]
    run(python, [*arguments(folder / "whole", model__name=policy), *sharding], folder / "log")
    given = [*arguments(folder / "killed", model__name=policy), *sharding]
    hold = Hold(folder / "hold", "row 3")
    process = start(python, given, folder / "killed.log", **hold.environment)
    wait_for(hold.held, process)
    kill(process)
    run(python, given, folder / "killed.log")
    return folder


def test_killed_sharded_run_ends_as_the_uninterrupted_one(two_runs):
    whole, killed = the_run(two_runs / "whole"), the_run(two_runs / "killed")
    assert (killed / "discarded.jsonl").exists()  # the third row, written before the kill and once more after it
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_times(killed / file) == without_times(whole / file)
    files = [file for run in (whole, killed) for file in run.glob("checkpoints/step-00000006/*.safetensors")]
    weights = [load_file(file) for file in files]
    assert len(weights) == 2 and all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_best_checkpoint_of_a_sharded_run_is_a_policy_and_nothing_else(two_runs):
    checkpoints = the_run(two_runs / "whole") / "checkpoints"
    best, last = min(checkpoints.iterdir()), max(checkpoints.iterdir())
    assert best != last
    assert [path for pattern in RESUME_FILES for path in last.glob(pattern)]
    names = {path.name for path in best.iterdir()} - {"training_args.bin", "README.md"}
    whole = {"model.safetensors", "config.json", "generation_config.json"}
    adapter = {"adapter_model.safetensors", "adapter_config.json"}
    text = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert names - text - {"trainer_state.json"} == (adapter if names & adapter else whole) and text < names
    model, tokenizer = AutoModelForCausalLM.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 ?"}], return_tensors="pt", return_dict=True)
    assert torch.isfinite(model(**ids).logits).all()
