"""Tests exact score vectors, their norms and sketches on the tiny policy, against torch.autograd token by token."""

import copy

import numpy as np
import pytest
import torch

from otb import exact_norms
from otb.exact_norms import trainable
from otb.laboratory import workers
from otb.laboratory.scores import Measured, Rollout, Sketch, forward, measure
from otb.score_norms import log_sum_squared_probs
from tests.support.trainers import with_adapter

TEMPERATURE, SIZE = 0.7, 61
# the second has a tool span: prompt of 4, two own tokens, three tool tokens, one own token
ROLLOUTS = [
    Rollout(torch.tensor([9, 8, 7, 31, 32, 33]), torch.tensor([0, 0, 0, 1, 1, 1]).bool(), 1.0),
    Rollout(torch.arange(40, 50), torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 0, 1]).bool(), float("nan")),
]


@pytest.fixture
def model(untrained):
    return untrained.eval()


def naive(model, rollout):
    """Returns log pi, log sum pi^2, d log pi / d parameters (T, n) of own tokens, with one backward each."""
    parameters, found = [p for p in model.parameters() if p.requires_grad], []
    for position in rollout.own.nonzero().flatten().tolist():
        logits = model(input_ids=rollout.ids[:position].unsqueeze(0)).logits[0, -1] / TEMPERATURE
        log_prob = logits.log_softmax(-1)[rollout.ids[position]]
        gradients = torch.autograd.grad(log_prob, parameters, allow_unused=True, retain_graph=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        score = torch.cat([g.flatten() for g in flat])
        found.append((log_prob.detach(), log_sum_squared_probs(logits.detach()), score))
    return [torch.stack(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("wrap", [lambda model: model, with_adapter], ids=["all parameters", "lora"])
@pytest.mark.parametrize("at_once", [(10**9, 16), (10**9, 2), (1, 16)], ids=["one block", "two", "token by token"])
def test_scores_are_those_of_autograd_token_by_token_and_blocks_change_nothing(model, wrap, at_once, monkeypatch):
    monkeypatch.setattr(exact_norms, "NUMBERS_AT_ONCE", at_once[0])
    monkeypatch.setattr("otb.laboratory.scores.TOKENS_TOGETHER", at_once[1])
    model = wrap(model)
    sketch = Sketch(trainable(model), SIZE)
    found = measure(model, ROLLOUTS, TEMPERATURE, sketch)
    assert found.lengths.tolist() == [3, 3] and found.rewards[0] == 1 and np.isnan(found.rewards[1])
    log_probs, log_sum_sq_probs, scores = map(torch.cat, zip(*(naive(model, r) for r in ROLLOUTS), strict=True))
    torch.testing.assert_close(torch.from_numpy(found.log_probs), log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(found.log_sum_sq_probs), log_sum_sq_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(found.token_norms), scores.square().sum(1), rtol=1e-3, atol=0)
    prefixes = torch.cat([part.cumsum(0) for part in scores.split(3)])  # a rollout's own tokens alone
    torch.testing.assert_close(torch.from_numpy(found.prefix_norms), prefixes.square().sum(1), rtol=1e-3, atol=0)
    expected = sketch([part.view(6, *p.shape) for part, p in zip(split(scores, model), trainable(model), strict=True)])
    scale = float(scores.norm(dim=1).max())
    torch.testing.assert_close(torch.from_numpy(found.sketches), expected, rtol=1e-3, atol=1e-4 * scale)
    assert all(parameter.grad is None for parameter in model.parameters())


def split(scores, model):
    return scores.split([parameter.numel() for parameter in trainable(model)], dim=1)


def test_lora_counts_only_what_it_trains(model):
    whole = sum(parameter.numel() for parameter in trainable(model))
    wrapped = with_adapter(model)
    adapter = [p for name, p in wrapped.named_parameters() if "lora_" in name]
    assert sum(p.numel() for p in trainable(wrapped)) == sum(p.numel() for p in adapter) < whole / 5
    assert len(Sketch(trainable(wrapped), SIZE)._signs) == len(adapter)


def test_hidden_states_are_what_the_head_reads(model):
    for rollout in ROLLOUTS:
        found = forward(model, rollout, TEMPERATURE)
        logits = model.get_output_embeddings()(found["hidden_states"]) / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(-1, rollout.ids[rollout.own].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found["log_probs"], chosen.detach(), rtol=1e-4, atol=1e-5)


def test_tokens_of_a_tool_condition_what_follows_and_are_not_scored(model):
    kept = forward(model, ROLLOUTS[1], TEMPERATURE)["log_probs"]
    ids = ROLLOUTS[1].ids.clone()
    ids[7] += 1
    changed = forward(model, Rollout(ids, ROLLOUTS[1].own, 0.0), TEMPERATURE)["log_probs"]
    torch.testing.assert_close(changed[:2], kept[:2])
    assert len(kept) == 3 and not torch.isclose(changed[2], kept[2])


def test_without_a_sketch_there_are_no_scores(model):
    found = measure(model, ROLLOUTS, TEMPERATURE, None)
    assert found.sketches.size == found.token_norms.size == found.prefix_norms.size == 0
    assert found.hidden_states.shape == (6, model.config.hidden_size)


# ---- the sketch


def vectors(seed, shapes=((3, 11), (7,))):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, *shape, generator=generator) for shape in shapes]


def test_sketch_on_literals_sums_every_size_th_coordinate_with_its_sign():
    sketch = Sketch([torch.zeros(5), torch.zeros(2)], 3)
    a, b = ([float(sign) for sign in signs.flatten()] for signs in sketch._signs)
    # coordinates 0 to 4 of the first parameter go to 0, 1, 2, 0, 1, coordinates of the second to 0, 1
    expected = [1 * a[0] + 4 * a[3] + 6 * b[0], 2 * a[1] + 5 * a[4] + 7 * b[1], 3 * a[2]]
    found = sketch([torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), torch.tensor([[6.0, 7.0]])])
    torch.testing.assert_close(found, torch.tensor([expected]))
    assert set(a + b) <= {-1.0, 1.0}


def test_sketch_is_linear_and_the_same_for_the_same_seed():
    x, y = vectors(0), vectors(1)
    sketch = Sketch([each[0] for each in x], 13)
    both = sketch([2 * a - 3 * b for a, b in zip(x, y, strict=True)])
    torch.testing.assert_close(both, 2 * sketch(x) - 3 * sketch(y))
    assert torch.equal(Sketch([each[0] for each in x], 13)(x), sketch(x))
    assert not torch.equal(Sketch([each[0] for each in x], 13, seed=1)(x), sketch(x))


def test_inner_products_of_sketches_are_unbiased_with_the_spread_that_is_stated():
    """Over 2,000 seeds the mean is within four standard errors, and the deviation near |x| |y| / sqrt(size)."""
    x, y, size = vectors(0), vectors(1), 13
    flat = [torch.cat([each[0].flatten() for each in vector]) for vector in (x, y)]
    found = []
    for seed in range(2000):
        sketch = Sketch([each[0] for each in x], size, seed)
        found.append(float(sketch(x)[0] @ sketch(y)[0]))
    deviation = np.std(found)
    assert abs(np.mean(found) - float(flat[0] @ flat[1])) < 4 * deviation / 2000**0.5
    assert 0.5 < deviation / float(flat[0].norm() * flat[1].norm() / size**0.5) < 1.5


# ---- files


def test_measured_survives_a_file_and_pads_each_rollout(tmp_path):
    kept = Measured(
        rewards=np.array([1.0, np.nan, 0.5]), lengths=np.array([2, 1, 3]), log_probs=-np.arange(6.0),
        log_sum_sq_probs=np.zeros(6), hidden_states=np.arange(12.0).reshape(6, 2), token_norms=np.zeros(0),
        prefix_norms=np.zeros(0), sketches=np.zeros(0),
    )  # fmt: skip
    kept.save(tmp_path / "file.npz")
    found = Measured.load(tmp_path / "file.npz")
    for name in Measured.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(found, name), getattr(kept, name))
    assert found.padded("log_probs").tolist() == [[0, -1, 0], [-2, 0, 0], [-3, -4, -5]]
    assert found.padded("hidden_states")[1].tolist() == [[4, 5], [0, 0], [0, 0]]


def test_a_file_bears_its_name_when_it_is_whole(tmp_path):
    def broken(file):
        file.write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        workers.whole_file(broken, tmp_path / "file.npz")
    assert not (tmp_path / "file.npz").exists()
    workers.whole_file(lambda file: file.write_text("whole"), tmp_path / "file.npz")
    assert (tmp_path / "file.npz").read_text() == "whole"


def test_a_worker_measures_with_the_policy_that_it_loaded(model, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_policy", {})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    workers.start(lambda: copy.deepcopy(model), SIZE, TEMPERATURE)
    workers.measure_prompt(ROLLOUTS, True, tmp_path / "file.npz")
    found, expected = (
        Measured.load(tmp_path / "file.npz"),
        measure(model, ROLLOUTS, TEMPERATURE, Sketch(trainable(model), SIZE)),
    )
    np.testing.assert_array_equal(found.sketches, expected.sketches)
    workers.measure_prompt(ROLLOUTS, False, tmp_path / "other.npz")
    assert Measured.load(tmp_path / "other.npz").sketches.size == 0
