"""Tests two gloo processes: prompt groups that span ranks get the same advantages as in a single process."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from otb.baselines.energy_probe import EnergyProbe
from otb.methods.improvement import PolicyImprovement
from otb.methods.mismatch import mismatch_metrics
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights
from otb.rollouts import OwnTokens, RolloutGroups, joined
from tests.support.commands import run_module_by_two
from tests.support.distributed_worker import head
from tests.support.groups import seen_by
from tests.support.improvement_updates import clipped_gradient


def naive_otb(rows):
    """Returns the advantages of one group from loops; rows with w and reward -> a list per row."""
    result = [[0.0] * len(row["w"]) for row in rows]
    for t in range(max(len(row["w"]) for row in rows)):
        alive = [i for i, row in enumerate(rows) if t < len(row["w"])]
        energy = {i: sum(rows[i]["w"][: t + 1]) for i in alive}
        baseline = sum(energy[i] * rows[i]["reward"] for i in alive) / (sum(energy.values()) + 1e-8)
        for i in alive:
            result[i][t] = rows[i]["reward"] - (0.0 if len(alive) == 1 else baseline)
    return result


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory) -> Path:
    """Returns what two ranks wrote: a folder per training, see tests/support/distributed_worker.py."""
    folder = tmp_path_factory.mktemp("ranks")
    run_module_by_two("tests.support.distributed_worker", [str(policy), str(folder)], folder / "log")
    return folder


def test_groups_that_span_ranks_get_the_same_advantages_as_naive_loops(trained):
    rows = [row for rank in (0, 1) for row in json.loads((trained / "otb" / f"rank{rank}.json").read_text())]
    assert len(rows) == 12
    for start in (0, 4, 8):
        group = rows[start : start + 4]
        for row, expected in zip(group, naive_otb(group), strict=True):
            assert max(abs(a - b) for a, b in zip(row["advantages"], expected, strict=True)) < 1e-4


def test_probe_of_two_ranks_is_that_of_one_process_that_sees_all_rollouts(trained):
    ranks = [torch.load(trained / "probe" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["state"].keys() == ranks[1]["state"].keys()
    for name, value in ranks[0]["state"].items():
        assert torch.equal(value, ranks[1]["state"][name]), name
    saved = torch.load(trained / "probe" / "checkpoint-2" / "baseline.pt", weights_only=True)
    assert all(torch.equal(value, saved[name]) for name, value in ranks[0]["state"].items())

    alone = EnergyProbe(group_correction=True)
    for step in (kept for kept in ranks[0]["kept"] if "rewards" in kept):
        names = ("rewards", "lengths", "score_norms", "sequence_norms")
        seen = seen_by(alone, RolloutGroups(**{name: step[name] for name in names}, reduced=step["reduced"]))
        torch.testing.assert_close(seen.totals["moments"], step["totals"]["moments"])
        torch.testing.assert_close(seen.reduced["values"], step["reduced"]["values"])
        assert seen.rewards.shape == (3, 4) and (seen.sequence_norms > 0).eq(seen.lengths > 0).all()
        alone.update(seen)
        last = step["prefix_norms"][..., -1]  # kept after the end, also where the other rank has the longest rollout
        torch.testing.assert_close(last, step["sequence_norms"], rtol=1e-4, atol=1e-4)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(value, saved[name], msg=name)


def test_gradient_noise_of_two_ranks_is_that_of_all_their_groups(trained):
    gradients = torch.cat([torch.load(trained / "noise" / f"gradients-rank{rank}.pt") for rank in (0, 1)]).double()
    batches = gradients.view(4, 2, -1).mean(1)  # two ranks x two micro-batches, of two groups each
    small, large = batches.square().sum(1).mean(), gradients.mean(0).square().sum()
    logged = json.loads((trained / "noise" / "metrics.json").read_text())
    assert logged["gradient_noise"] == pytest.approx(float((small - large) / (1 / 2 - 1 / 8)), rel=1e-3)
    assert logged["gradient_signal"] == pytest.approx(float((8 * large - 2 * small) / 6), rel=1e-3, abs=1e-6)


def test_learning_rate_and_mismatch_of_two_ranks_are_those_of_all_their_rollouts(trained):
    ranks = [torch.load(trained / "copied" / f"rank{rank}.pt") for rank in (0, 1)]
    width = max(ratio.shape[1] for rank in ranks for ratio in rank["ratios"])
    steps = torch.full((4, 12, width), torch.nan)
    for rank, found in enumerate(ranks):
        for step, ratio in enumerate(found["ratios"]):
            steps[step, 6 * rank : 6 * rank + 6, : ratio.shape[1]] = ratio
    alone = LengthTriggeredDecay(warmup=0, baseline_steps=1, ratio=1.001, period_factor=0.5)
    for step, ratio in enumerate(steps):
        expected = mismatch_metrics(ratio, ~ratio.isnan()) | {"learning_rate": 1e-3 * alone(step)}
        assert expected["mismatch_k3"] > 0
        for rank in ranks:
            row = rank["rows"][step]
            assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-9)
        alone.observe(step, float((~ratio.isnan()).sum(1).float().mean()))
    assert alone.surge_step is not None and ranks[0]["rows"][3]["learning_rate"] < 1e-3
    assert ranks[0]["rows"][3]["learning_rate"] == ranks[1]["rows"][3]["learning_rate"]


def test_an_auxiliary_head_of_two_ranks_is_that_of_one_process_with_all_rollouts(trained, policy, tmp_path):
    """On the same rollouts, lambda, cross-entropy and the weights of policy and head agree after four updates."""
    head(str(policy), str(tmp_path), rollouts=12)
    alone = torch.load(tmp_path / "rank0.pt")
    first, second = (torch.load(trained / "head" / f"rank{rank}.pt") for rank in (0, 1))
    for mine, other, expected in zip(first["weights"], second["weights"], alone["weights"], strict=True):
        assert torch.equal(mine, other)
        # a step moves each weight by 1e-3, a hundredth of its size; where a gradient is near 0, Adam magnifies rounding
        assert (mine - expected).norm() < 1e-3 * expected.norm()
    for row, expected in zip(first["rows"], alone["rows"], strict=True):
        names = [name for name in expected if name.startswith("mtp_")]
        assert {name: row[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=2e-2)
    assert alone["rows"][1]["mtp_lambda"] != 0


def test_token_weights_of_two_ranks_are_those_of_one_process_that_sees_all_rollouts(trained):
    ranks = [torch.load(trained / "weights" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    saved = torch.load(trained / "weights" / "checkpoint-3" / "token_weights.pt", weights_only=True)
    assert ranks[0]["state"] == ranks[1]["state"] == saved and saved["count"] > 0
    alone = TokenWeights("arca", normalise="running")
    for steps in zip(*(rank["kept"] for rank in ranks), strict=True):
        assert steps[0]["state"] == steps[1]["state"]
        assert alone.state_dict() == pytest.approx(steps[0]["state"], rel=1e-6)
        own, signals, rewards, advantages = (
            joined([step[name] for step in steps], dim=1) for name in ("own", "signals", "rewards", "advantages")
        )
        packed = OwnTokens(own)
        signals = signals[:, : packed.width]
        rewards = rewards.view(-1, 4)
        baseline = (rewards.sum(1, keepdim=True) - rewards) / 3
        expected = (rewards - baseline).view(-1, 1) * alone.factors(signals, packed.own)
        torch.testing.assert_close(packed.pack(advantages), expected)
        alone.update(signals, packed.own)
    assert alone.state_dict() == pytest.approx(saved, rel=1e-6)


def test_improvement_updates_of_two_ranks_are_those_of_one_process_that_sees_all_rollouts(policy, trained):
    ranks = [torch.load(trained / "improvement" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    model = AutoModelForCausalLM.from_pretrained(policy)
    alone, made = PolicyImprovement("shuffled", window=2, cap=3.0, seed=7), 0  # of the trainers' configuration
    for first, second in zip(*(rank["updates"] for rank in ranks), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in ("before", "after", "rewards"))
        assert first["row"] == second["row"] and len(first["rewards"]) == 12
        reading = alone.observe(float(first["rewards"].mean()))
        assert {name: first["row"].get(name) for name in reading.metrics()} == pytest.approx(reading.metrics())
        if not reading.phi:
            assert torch.equal(first["before"], first["after"])
            continue
        made += 1
        torch.nn.utils.vector_to_parameters(first["before"], model.parameters())
        gradient = clipped_gradient(model, [*first["kept"], *second["kept"]], reading.phi, longest=12)
        torch.testing.assert_close((first["before"] - first["after"]) / 3.0, gradient, rtol=2e-3, atol=2e-5)
    assert made == 1, "the second xi is the first to draw from"
    for number, rank in enumerate(ranks):
        for kept, expected in rank["scaled"]:
            torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
        file = trained / "improvement" / "checkpoint-4" / f"improvement_{number}.pt"
        saved = torch.load(file, weights_only=True)
        assert saved["window"] == alone.state_dict() and saved["processes"] == 2
        ids = [batch["completion_ids"] for batch in saved["batches"]]
        assert all(torch.equal(mine, kept["completion_ids"]) for mine, kept in zip(ids, rank["kept"], strict=True))
