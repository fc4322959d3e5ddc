"""Tests runs and evaluations with rollouts_by=vllm on vLLM for CPUs: with and without tools, 1 and 2 processes."""

import math
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.commands import ROOT, rows, the_run
from tests.support.ranks import Ranks, started
from tests.support.vllm_policies import ANSWER, CALL, save_caller, save_untrained
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.needs_vllm
SHORT = {
    "rollouts_by": "vllm",
    "task.eval_prompts": 4,
    "evaluation.every": 2,
    "evaluation.samples": 2,
    "group_size": 4,
    "prompts_per_step": 4,
    "task.train_prompts": 4,
    "rollouts.every": 1,
    "steps": 3,
}
PARITY = SHORT | {"task._target_": "tests.support.parity_task.Parity", "task.max_completion_length": 8}
ONE_PROMPT = PARITY | {"task.train_prompts": 1, "prompts_per_step": 1, "group_size": 8, "learning_rate": 0.05}
TOOLS = SHORT | {"task": "arithmetic_tools", "sandbox": "unsafe_subprocess", "steps": 2}
SHARDED = PARITY | {"model.dtype": "bfloat16", "learning_rate": 0.01, "rollouts_by.sleep": "false"}
SHARED_MEMORY = Path("/dev/shm")
CLIP = 1.005  # of the ratios, so close to 1 that some must be clipped
REPLY = "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"  # to CALL
BAND = (0.5, 1.0005)  # of a rollout's geometric mean ratio: about half of them have a larger one
RUNS = {
    "seed 0": ONE_PROMPT,
    "seed 1": ONE_PROMPT | {"seed": 1, "trainer.vllm_importance_sampling_clip_max": CLIP},
    "lora": ONE_PROMPT | {"model.lora.r": 4, "geometric_ratio_band": f"[{BAND[0]},{BAND[1]}]"},
    "tools": TOOLS,
    "fsdp2": SHARDED | {"parallel": "fsdp2"},
    "zero3": SHARDED | {"parallel": "zero3"},
    "fsdp2 lora": SHARDED | {"parallel": "fsdp2", "model.lora.r": 4},
    "zero3 lora": SHARDED | {"parallel": "zero3", "model.lora.r": 4},
    "fsdp2 energy_probe": SHARDED | {"parallel": "fsdp2", "baseline": "energy_probe"},
}


@pytest.fixture(scope="module")
def policies(tokenizer, tmp_path_factory):
    """Returns name of the run -> folder of its policy."""
    folder = tmp_path_factory.mktemp("policies")
    untrained = save_untrained(tokenizer, folder / "untrained")
    return {name: untrained for name in RUNS} | {"tools": save_caller(tokenizer, folder / "caller")}


@pytest.fixture(scope="module")
def made(vllm_python, policies, tmp_path_factory):
    """Returns a function that makes one of RUNS, once -> its directory and output."""
    folder, done = tmp_path_factory.mktemp("vllm"), {}

    def make(name):
        if name not in done:
            values = RUNS[name] | {"model.name": policies[name], "runs_dir": folder / name}
            given = [f"{key}={value}" for key, value in values.items()]
            done[name] = the_run_of(vllm_python, given, folder / name)
        return done[name]

    return make


def the_run_of(python, given, folder):
    kind = next((kind for kind in ("fsdp2", "zero3") if f"parallel={kind}" in given), None)
    log = folder.with_suffix(".log")
    if kind is not None:
        ranks = Ranks(kind, given, log, python, module="vllm_run")
        assert ranks.join(), log.read_text()[-3000:]
    else:
        with_vllm(python, given, log)
    return the_run(folder), log.read_text()


def with_vllm(python, given, log):
    """Runs the command in one process to its end."""
    command = [python, "-m", "tests.support.vllm_run", *given]
    with open(log, "wb") as output:
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        options = {"stdout": output, "stderr": output, "timeout": PATIENCE_SECONDS}
        code = subprocess.run(command, cwd=ROOT, env=variables, **options).returncode
    assert code == 0, log.read_text()[-3000:]


def kept(run, step):
    return pd.read_parquet(run / "rollouts" / f"step-{step:08d}.parquet")


def responses(run, step):
    table = kept(run, step)
    return table["prompt_text"].tolist(), table["response_text"].tolist()


@pytest.mark.parametrize("name", ["seed 0", "lora", "fsdp2", "zero3", "fsdp2 lora", "zero3 lora"])
def test_vllm_samples_with_the_weights_of_every_step(made, policies, name):
    """vLLM's log-probs stay close to the trainer's, while the policy moves away from its start."""
    run, _ = made(name)
    metrics = rows(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(0 < row["mismatch_mean"] < 0.03 and row["mismatch_max"] < 0.15 for row in metrics)
    tokenizer = AutoTokenizer.from_pretrained(policies["seed 0"])
    ids = tokenizer(responses(run, 3)[0][0], add_special_tokens=False, return_tensors="pt")["input_ids"]
    places = (policies["seed 0"], run / "checkpoints" / "step-00000003")
    before, after = (AutoModelForCausalLM.from_pretrained(place)(ids).logits.log_softmax(-1)[0, -1] for place in places)
    assert (before - after).abs().mean() > 10 * metrics[-1]["mismatch_mean"]


def test_two_processes_that_share_a_copy_of_the_policy_draw_the_same_tokens(vllm_python, policies, tmp_path):
    """Each draws both processes' tokens; if they differed, both would wait forever. The evaluation is checked too."""
    values = PARITY | {"rollouts_by.tensor_parallel": 2, "rollouts_by.sleep": "false", "learning_rate": 0.01}
    values |= {"trainer.use_cpu": "true", "model.name": policies["seed 0"], "runs_dir": tmp_path / "runs"}
    given, before = [f"{key}={value}" for key, value in values.items()], set(SHARED_MEMORY.glob("*cpushm*"))
    process = started(vllm_python, "vllm_run", given, tmp_path / "log", {})
    code = process.wait(PATIENCE_SECONDS)
    for left in set(SHARED_MEMORY.glob("*cpushm*")) - before:
        left.unlink()
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    run = the_run(tmp_path / "runs")
    metrics, evaluations = rows(run / "metrics.jsonl"), rows(run / "evaluations.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3] and [row["step"] for row in evaluations] == [0, 2, 3]
    assert all(0 < row["mismatch_mean"] < 0.03 and row["mismatch_max"] < 0.15 for row in metrics)
    _, first = responses(run, 1)
    assert len(first) == 8 and len(set(first)) > 4  # those of the first process


def test_runs_of_different_seeds_sample_different_responses_to_the_same_prompt(made):
    """vLLM seeds each process with the process's number, whatever the run's seed is."""
    (prompts, first), (same_prompts, other) = (responses(made(name)[0], 1) for name in ("seed 0", "seed 1"))
    assert prompts == same_prompts and len(set(prompts)) == 1
    assert sum(mine == its for mine, its in zip(first, other, strict=True)) < len(first) / 2


def test_importance_ratios_are_clipped_token_by_token(made):
    free, clipped = (rows(made(name)[0] / "metrics.jsonl")[0] for name in ("seed 0", "seed 1"))
    assert CLIP < free["importance_ratio_max"] < 1.001 * math.exp(free["mismatch_max"])  # one token's, not a product
    assert clipped["importance_ratio_max"] == pytest.approx(CLIP)
    assert clipped["mismatch_max"] > 0.005 and clipped["importance_ratio_min"] < 1


def test_rollouts_whose_geometric_mean_ratio_leaves_the_band_are_dropped(made):
    """Adapters begin at zero, so the first rollouts equal those of the run without adapters and without a band."""
    (run, _), (other, _) = made("lora"), made("seed 0")
    left, whole = kept(run, 1), kept(other, 1)
    sampled = torch.load(run / "sampled-1.pt").numpy()
    differences = [(mine - its[: len(mine)]).mean() for mine, its in zip(whole["log_probs"], sampled, strict=True)]
    outside = [not BAND[0] <= math.exp(difference) <= BAND[1] for difference in differences]
    assert left["tokens"].map(len).eq(0).tolist() == outside and 0 < sum(outside) < len(outside)
    stay = [not dropped for dropped in outside]
    assert left["response_text"][stay].tolist() == whole["response_text"][stay].tolist()
    row, unbanded = (rows(folder / "metrics.jsonl")[0] for folder in (run, other))
    assert row["dropped_by_mismatch"] == sum(outside) / len(outside) and "dropped_by_mismatch" not in unbanded
    assert row["own_tokens"] == unbanded["own_tokens"]  # what was sampled was paid for


def test_evaluations_are_sampled_by_vllm_too(made):
    run, _ = made("seed 0")
    evaluations = rows(run / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert all((row["prompts"], row["samples"]) == (4, 2) for row in evaluations)
    assert all(1 <= row["response_length_mean"] <= 8 for row in evaluations)


def test_vllm_says_nothing_that_is_no_warning_and_samples_a_float32_policy_in_bfloat16(made, policies):
    """docs/gpus.md states the bfloat16; TRL has no option for it."""
    _, printed = made("seed 0")
    assert "INFO" not in printed
    assert f"vLLM loads {policies['seed 0']} and samples in torch.bfloat16" in printed


def test_tools_are_called_between_turns_that_vllm_samples(made):
    run, _ = made("tools")
    for row in rows(run / "metrics.jsonl"):
        assert row["tool_calls"] > 0 and row["tool_tokens"] > 0 and row["never_called"] < 1
        assert row["tool_refused"] < 1 and row["turns_mean"] > 1
        assert row["mismatch_max"] < 0.15  # of own tokens alone; a tool's have no log-prob of the sampler


def test_checkpoints_of_a_run_are_evaluated_by_vllm_each_with_its_own_weights(
    made, vllm_python, policies, tokenizer, tmp_path
):
    """The run's checkpoint calls Python in half of its turns; a second checkpoint always answers 8."""
    run = tmp_path / "run"
    shutil.copytree(made("tools")[0], run)
    eight = ANSWER.replace("7", "8")
    save_caller(tokenizer, run / "checkpoints" / "step-00000001", turns=(eight,))
    given = [f"run={run}", "rollouts_by=vllm", "sandbox=unsafe_subprocess", "task.eval_prompts=64", "k=2"]
    given += ["temperature=0.1", f"evaluations_dir={tmp_path / 'found'}"]  # at which the policies are certain
    with_vllm(vllm_python, ["evaluate", *given], tmp_path / "log")
    answering, calling = sorted((tmp_path / "found").rglob("step-*"))
    solutions = {row["problem"]: row["answer"] for row in rows(answering / "problems.jsonl")}
    for row in rows(answering / "samples.jsonl"):
        assert (row["response"], row["tool_tokens"], row["ending"]) == (eight, 0, "end")
        assert row["reward"] == (solutions[row["problem"]] == "8")
    share = list(solutions.values()).count("8") / 64
    assert pd.read_csv(answering / "results.csv").set_index("measure")["estimate"]["avg_at_k"] == share > 0
    ended = [row for row in rows(calling / "samples.jsonl") if row["ending"] == "end"]
    for row in ended:  # calls and replies first, at most four
        assert row["response"].replace(CALL + REPLY, "") == ANSWER
        assert row["reward"] == (solutions[row["problem"]] == "7")
        calls, tokens = row["response"].count(CALL), len(tokenizer(ANSWER)["input_ids"])
        assert row["own_tokens"] == tokens + calls * len(tokenizer(CALL)["input_ids"])
    assert 32 < sum(row["tool_tokens"] > 0 for row in ended) < 96 < len(ended)


@pytest.mark.parametrize("trained", ["", " lora"])
def test_sharded_policies_reach_vllm_and_their_first_step_is_the_same(made, trained):
    """FSDP2 and ZeRO-3 in bfloat16 have the same weights, so the same rollouts, energies and gradient."""
    fsdp2, zero3 = (rows(made(f"{kind}{trained}")[0] / "metrics.jsonl") for kind in ("fsdp2", "zero3"))
    assert len(fsdp2) == len(zero3) == 3
    for name in ("own_tokens", "reward_mean", "mismatch_mean", "energy_mean", "total_power", "gradient_norm"):
        assert zero3[0][name] == pytest.approx(fsdp2[0][name], rel=1e-3), name
    assert all(0 < row["mismatch_mean"] < 0.03 for row in [*fsdp2, *zero3])


def test_probe_of_a_sharded_run_is_fitted_to_the_rollouts_of_both_processes(made):
    """The first baseline is the mean of the group's others; its sums then hold all energies, decayed step by step."""
    run, _ = made("fsdp2 energy_probe")
    first, second = kept(run, 1), kept(run, 2)
    for _, group in first.groupby("prompt"):
        of_others = (group["reward"].sum() - group["reward"]) / (len(group) - 1)
        for mean, values in zip(of_others, group["baselines"], strict=True):
            assert values == pytest.approx([mean] * len(values))  # the run computes in float32
    assert len({value for values in second["baselines"] for value in values}) > len(second)  # of the prefix
    energies = [row["energy_mean"] * 16 for row in rows(run / "metrics.jsonl")]  # 4 prompts x 4, of both processes
    state = torch.load(run / "checkpoints" / "step-00000003" / "baseline.pt")
    decayed = 0.9**2 * energies[0] + 0.9 * energies[1] + energies[2]
    assert state["moments"][-1, -1].item() == pytest.approx(decayed, rel=1e-5)  # phi ends with a 1: the sum of w
