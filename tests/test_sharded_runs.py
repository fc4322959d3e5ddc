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


def run(python, given, log):
    process = start(python, given, log)
    assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()[-3000:]


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero3", marks=pytest.mark.needs_vllm)])
def two_runs(request, policy, tmp_path_factory):
    """Run directories of a run that was left alone, and of one that was killed after its third step."""
    parallel = request.param
    python = request.getfixturevalue("vllm_python") if parallel == "zero3" else sys.executable
    folder = tmp_path_factory.mktemp(parallel)
    run(python, [*arguments(folder / "whole", model__name=policy), f"parallel={parallel}"], folder / "log")
    given = [*arguments(folder / "killed", model__name=policy), f"parallel={parallel}"]
    hold = Hold(folder / "hold", "row 3")
    process = start(python, given, folder / "killed.log", **hold.environment)
    wait_for(hold.held, process)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait()
    run(python, given, folder / "killed.log")
    return folder


def test_killed_sharded_run_ends_as_the_uninterrupted_one(two_runs):
    whole, killed = the_run(two_runs / "whole"), the_run(two_runs / "killed")
    assert (killed / "discarded.jsonl").exists()  # the third row, written before the kill and once more after it
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_times(killed / file) == without_times(whole / file)
    weights = [load_file(run / "checkpoints" / "step-00000006" / "model.safetensors") for run in (whole, killed)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_best_checkpoint_of_a_sharded_run_is_a_policy_and_nothing_else(two_runs):
    checkpoints = the_run(two_runs / "whole") / "checkpoints"
    best, last = min(checkpoints.iterdir()), max(checkpoints.iterdir())
    assert best != last
    assert not [path for pattern in RESUME_FILES for path in best.glob(pattern)]
    assert [path for pattern in RESUME_FILES for path in last.glob(pattern)]
    assert len(list(best.glob("*.safetensors"))) == 1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1 ?"}], return_tensors="pt", return_dict=True)
    assert torch.isfinite(model(**ids).logits).all()
