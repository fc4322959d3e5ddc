"""A run that is sharded over two processes: killed and resumed it is the uninterrupted one; its best can be read.

A few random kills are in the suite; the long form is OTB_SOAK_KILLS=10 pytest tests/running/test_sharded_runs.py -k
random.
"""

import os
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.running.run_trainer import RESUME_FILES
from tests.support.commands import arguments, rows, the_run, without_times
from tests.support.holds import Hold
from tests.support.ranks import Ranks
from tests.support.waiting import wait_for

FSDP2, ZERO3 = ["parallel=fsdp2", "model.dtype=bfloat16"], ["parallel=zero3", "model.dtype=bfloat16"]
ONE_FILE = "parallel.trainer.fsdp_config.state_dict_type=FULL_STATE_DICT"
RUNS = {
    "fsdp2": FSDP2,
    "fsdp2 in one file, lora": [*FSDP2, ONE_FILE, "model.lora.r=4"],
    "zero3": ZERO3,
    "zero3, lora": [*ZERO3, "model.lora.r=4"],
}
MARKED = {name: pytest.param(name, marks=pytest.mark.needs_vllm if "zero3" in name else ()) for name in RUNS}
IN_THE_SUITE = {"fsdp2": 2, "fsdp2 in one file, lora": 1, "zero3": 1}  # a kill under ZeRO-3 costs a minute
KILLS = dict.fromkeys(RUNS, int(os.environ["OTB_SOAK_KILLS"])) if "OTB_SOAK_KILLS" in os.environ else IN_THE_SUITE


@pytest.fixture(scope="module", params=MARKED.values())
def run_name(request):
    """One of RUNS."""
    return request.param


@pytest.fixture(scope="module")
def start(request, run_name, policy):
    """A function that starts the run in a folder: its Ranks."""
    kind = run_name[:5]
    python = request.getfixturevalue("vllm_python") if kind == "zero3" else None

    def start_in(runs_dir, killed_after=None, **environment):
        given = [*arguments(runs_dir, model__name=policy), *RUNS[run_name]]
        return Ranks(kind, given, runs_dir.with_suffix(".log"), python, killed_after, **environment)

    return start_in


@pytest.fixture(scope="module")
def two_runs(start, tmp_path_factory):
    """Run directories of a run that was left alone, and of one that was killed after its third step."""
    folder = tmp_path_factory.mktemp("runs")
    whole = start(folder / "whole")
    assert whole.join(), whole.printed()[-3000:]
    hold = Hold(folder / "hold", "row 3")
    killed = start(folder / "killed", **hold.environment)
    wait_for(hold.held, killed.processes[0])
    killed.kill()
    resumed = start(folder / "killed")
    assert resumed.join(), resumed.printed()[-3000:]
    return folder


def assert_same(killed, whole):
    """Metrics, evaluations and final weights are equal."""
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        assert without_times(killed / file) == without_times(whole / file)
    files = [file for run in (whole, killed) for file in run.glob("checkpoints/step-00000006/*.safetensors")]
    weights = [load_file(file) for file in files]
    assert len(weights) == 2 and all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_killed_sharded_run_ends_as_the_uninterrupted_one(two_runs):
    whole, killed = the_run(two_runs / "whole"), the_run(two_runs / "killed")
    assert rows(killed / "discarded.jsonl")  # the third row, written before the kill and once more after it
    assert_same(killed, whole)


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


@pytest.mark.parametrize("run_name", [MARKED[name] for name in KILLS], indirect=True)
def test_sharded_run_killed_at_random_moments_ends_as_the_uninterrupted_one(run_name, start, two_runs, tmp_path):
    """A process is killed after a random part of its own time, that of the processor; the other one ends with it."""
    moments, kills, finished = random.Random(1), 0, 0
    whole = min(float(file.read_text()) for file in two_runs.glob("whole.log.cpu_seconds.*"))
    while kills < KILLS[run_name]:
        while True:
            killed_after = (moments.randrange(2), moments.uniform(0.0, whole)) if kills < KILLS[run_name] else None
            ranks = start(tmp_path / f"runs{finished}", killed_after)
            if ranks.join():
                break
            assert killed_after, ranks.printed()[-3000:]
            kills += 1
        assert_same(the_run(tmp_path / f"runs{finished}"), the_run(two_runs / "whole"))
        finished += 1
