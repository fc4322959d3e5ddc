"""Compares exact score norms with loops over single tokens and with finite differences, also under LoRA."""

import copy

import pytest
import torch

from otb import exact_norms
from otb.exact_norms import own_log_probs, prefix_norms, scores, sequence_norms, trainable
from tests.support.trainers import with_adapter

TEMPERATURE = 0.7


@pytest.fixture
def model(untrained):
    return untrained.double().eval()


@pytest.fixture
def batch():
    """Returns ids, attention mask, own tokens (3, 12), with padding on both sides, a tool span, an empty rollout."""
    ids = torch.randint(0, 400, (3, 12), generator=torch.Generator().manual_seed(1))
    attention_mask, own = torch.ones(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.bool)
    attention_mask[0, :2] = attention_mask[0, 10:] = 0
    own[0, 5:10] = own[1, 4:6] = own[1, 8:12] = True
    return ids, attention_mask, own


def token_scores(model, ids, attention_mask, own, row):
    """Returns d log pi_t / d parameters, (T, n), with a backward per own token on the padded row with its mask."""
    parameters, found = [p for p in model.parameters() if p.requires_grad], []
    for position in own[row].nonzero().flatten().tolist():
        positions = (attention_mask[row].cumsum(0) - 1).clamp(min=0).unsqueeze(0)
        logits = model(ids[row : row + 1], attention_mask=attention_mask[row : row + 1], position_ids=positions).logits
        log_prob = (logits[0, position - 1] / TEMPERATURE).log_softmax(-1)[ids[row, position]]
        gradients = torch.autograd.grad(log_prob, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        found.append(torch.cat([g.flatten() for g in flat]))
    return torch.stack(found)


@pytest.mark.parametrize("wrap", [lambda model: model, with_adapter], ids=["all parameters", "lora"])
@pytest.mark.parametrize("at_once", [10**9, 1], ids=["one block", "token by token"])
def test_norms_equal_loops_over_single_tokens(model, batch, wrap, at_once, monkeypatch):
    monkeypatch.setattr(exact_norms, "NUMBERS_AT_ONCE", at_once)
    model = wrap(model)
    sequences, prefixes = (norms(model, *batch, TEMPERATURE) for norms in (sequence_norms, prefix_norms))
    assert prefixes.shape == (3, 6)
    for row in (0, 1):
        running = token_scores(model, *batch, row).cumsum(0).square().sum(-1)
        length = len(running)
        torch.testing.assert_close(prefixes[row, :length], running.float(), rtol=1e-5, atol=0)
        assert prefixes[row, length:].eq(prefixes[row, length - 1]).all()
        torch.testing.assert_close(sequences[row], running[-1].float(), rtol=1e-5, atol=0)
    assert sequences[2] == 0 and prefixes[2].eq(0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_importance_weights_multiply_the_scores(model, batch):
    rho = torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2
    running = (token_scores(model, *batch, 1) * rho[1][batch[2][1]].unsqueeze(-1)).cumsum(0).square().sum(-1)
    torch.testing.assert_close(prefix_norms(model, *batch, TEMPERATURE, rho)[1], running.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        sequence_norms(model, *batch, TEMPERATURE, rho)[1], running[-1].float(), rtol=1e-5, atol=0
    )


def test_sequence_norm_is_the_slope_of_the_log_probability_along_the_score(model, batch):
    """Central differences: (L(theta + h s) - L(theta - h s)) / 2h = ||s||^2."""
    row = [each[0] for each in batch]
    parameters = trainable(model)
    log_probs = own_log_probs(model, *row, TEMPERATURE)
    direction = [each[0] for each in scores(log_probs, parameters, torch.ones_like(log_probs).unsqueeze(0))]

    def moved(step):
        there = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, each in zip(there.parameters(), direction, strict=True):
                parameter += step * each
            return own_log_probs(there, *row, TEMPERATURE).sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    torch.testing.assert_close(sequence_norms(model, *batch, TEMPERATURE)[0], slope.float(), rtol=1e-4, atol=0)


def test_scores_give_single_tokens_and_any_sums_of_them(model, batch):
    log_probs = own_log_probs(model, *(each[1] for each in batch), TEMPERATURE)
    weights = torch.rand(3, 6, dtype=torch.float64)
    literal = token_scores(model, *batch, 1)
    for given, expected in ((torch.eye(6, dtype=torch.float64), literal), (weights, weights @ literal)):
        found = torch.cat([each.flatten(1) for each in scores(log_probs, trainable(model), given)], 1)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)  # the policy's norms compute in float32


def test_too_many_trainable_parameters_are_refused_with_what_to_do(model, batch, monkeypatch):
    monkeypatch.setattr(exact_norms, "MAX_PARAMETERS", 1000)
    with pytest.raises(ValueError, match="trainable parameters.*model.lora.r=16.*baseline=otb"):
        sequence_norms(model, *batch, TEMPERATURE)
