"""FSDP2 and ZeRO-3 on two gloo processes train like plain data parallelism; log-probs stay float32 under bfloat16."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.support.commands import run_module_by_two

ROOT = Path(__file__).resolve().parent.parent


def trainings(parallel):
    """Options of tests/support/sharded_worker.py by name."""
    bfloat16 = {"parallel": parallel, "bf16": True}
    lora = {"lora": True, "weights": "bfloat16"}
    return {
        "plain": {},
        "sharded": {"parallel": parallel},
        "whole, extra pass": bfloat16,
        "whole, pass of TRL": bfloat16 | {"num_iterations": 2},
        "lora, extra pass": bfloat16 | lora,
        "lora, pass of TRL": bfloat16 | lora | {"num_iterations": 2},
    }


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero3", marks=pytest.mark.needs_vllm)])
def written(request, policy, tmp_path_factory):
    """The folder in which both processes wrote what each of the trainings gave them."""
    folder = tmp_path_factory.mktemp("sharded")
    module, given = "tests.support.sharded_worker", [str(policy), str(folder), json.dumps(trainings(request.param))]
    if request.param == "zero3":  # of another environment, so nothing can be forked
        command = [request.getfixturevalue("vllm_python"), "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", module, *given]
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-3000:]
    else:
        run_module_by_two(module, given, folder / "log")
    return folder


def both_ranks(folder, name):
    return [torch.load(folder / f"{name}-rank{rank}.pt") for rank in (0, 1)]


def recomputed(policy, batch):
    """log pi and w of one process's rows in float32, from full logits; zero where no token was sampled."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask = batch["completion_mask"]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1][:, -mask.shape[1] :]
    log_probs = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    return log_probs * mask, logit_gradient_proxy(log_probs, log_sum_squared_probs(logits)) * mask


def test_sharded_training_is_that_of_plain_data_parallelism(written):
    plain, sharded = both_ranks(written, "plain"), both_ranks(written, "sharded")
    for rank in (0, 1):
        for mine, its in zip(plain[rank]["batches"], sharded[rank]["batches"], strict=True):
            assert mine["sharded"] == 0 and its["sharded"] > 30
            assert torch.equal(mine["completion_ids"], its["completion_ids"])
            torch.testing.assert_close(mine["score_norms"], its["score_norms"])
            torch.testing.assert_close(mine["advantages"], its["advantages"], rtol=1e-4, atol=1e-5)
    for mine, its in zip(plain[0]["log"][:2], sharded[0]["log"][:2], strict=True):
        assert its["loss"] == pytest.approx(mine["loss"], rel=1e-4)
        assert its["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
    weights = torch.load(written / "sharded-weights.pt")
    for name, value in torch.load(written / "plain-weights.pt").items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("training", [name for name in trainings("fsdp2") if "pass" in name])
def test_sharding_in_bfloat16_keeps_log_probs_and_score_norms_in_float32(written, policy, training):
    ranks = both_ranks(written, training)
    assert ranks[0]["sums"] == {torch.float32}
    for rank, seen in enumerate(ranks):
        batch = seen["batches"][0]  # the weights are still those of `policy`
        log_probs, w = recomputed(policy, batch)
        measured = batch["score_norms"].flatten(0, 1)[rank * len(w) :][: len(w), : w.shape[1]]
        assert measured.dtype == torch.float32
        torch.testing.assert_close(measured, w[:, : measured.shape[1]], rtol=0.05, atol=0.02)  # bfloat16 activations
        if "TRL" in training:
            kept = batch["old_per_token_logps"]
            assert kept.dtype == torch.float32
            assert not torch.equal(kept, kept.bfloat16().float())  # never rounded to eight bits on its way
            torch.testing.assert_close(kept * batch["completion_mask"], log_probs, rtol=0.02, atol=0.05)
    assert all(torch.isfinite(torch.tensor(log["grad_norm"])) for log in ranks[0]["log"][:2])
