"""Tests the multi-token-prediction head by itself: its predictions, lambda on known vectors, losses, refusals."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from otb.methods.auxiliary import ARCHITECTURES, MultiTokenPrediction, refuse_architecture
from otb.methods.mtp import (
    MTPHead,
    aggregated,
    clipped,
    head_log_probs,
    mean_of_ratios,
    predicted,
    products,
    ratio_of_sums,
)
from otb.policies.mimo import MiMoConfig

SMALL = dict(
    vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, head_dim=8, initializer_range=0.3,
)  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "mistral": MistralConfig, "mimo": MiMoConfig,
}  # fmt: skip


def small(architecture: str, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[architecture](**(SMALL | options)))


def states_of(model, ids, mask):
    return model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state


def naive(head, model, ids, states, temperature):
    """Returns log-probs of one row without padding from full logits: token p from state p - 2 and token p - 1."""
    embedded = model.get_input_embeddings()(ids[:, 1:-1])
    predicting = head(states[:, :-2], embedded, torch.ones_like(ids[:, 2:]))
    log_probs = (model.get_output_embeddings()(predicting) / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids[:, 2:].unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_stand_at_the_token_that_they_are_of_and_padding_changes_nothing(architecture, tied):
    model = small(architecture, tie_word_embeddings=tied)
    head = MTPHead(model, seed=3)
    ids = torch.randint(1, 13, (1, 9))
    mask = torch.ones_like(ids)
    of_head = head_log_probs(head, model, ids, mask, states_of(model, ids, mask), 9, 0.7, detached=False)
    assert of_head[0, :2].eq(0).all() and predicted(mask, 9).tolist() == [[False] * 2 + [True] * 7]
    torch.testing.assert_close(of_head[:, 2:], naive(head, model, ids, states_of(model, ids, mask), 0.7))
    padded = torch.nn.functional.pad(ids, (3, 2), value=0)
    padded_mask = torch.nn.functional.pad(mask, (3, 2))
    states = states_of(model, padded, padded_mask)
    of_padded = head_log_probs(head, model, padded, padded_mask, states, 11, 0.7, detached=False)
    assert predicted(padded_mask, 11).tolist() == [[False] * 2 + [True] * 9]  # the last two are padding
    torch.testing.assert_close(of_padded[:, 2:9], of_head[:, 2:])


def test_a_head_sees_a_token_and_what_is_before_it_but_never_the_one_it_predicts():
    model = small("qwen3")
    head = MTPHead(model, seed=3)
    ids = torch.randint(1, 13, (1, 8))
    mask = torch.ones_like(ids)

    def log_probs(ids):
        return head_log_probs(head, model, ids, mask, states_of(model, ids, mask), 8, 1.0, detached=True)[0]

    before, changed = log_probs(ids), ids.clone()
    changed[0, 5] = ids[0, 5] % 12 + 1
    moved = (log_probs(changed) - before).abs() > 1e-6
    assert moved.tolist() == [False] * 5 + [True] * 3  # the token itself, and the tokens predicted from it


def test_a_head_learns_a_sequence_whose_second_next_token_is_known():
    """In the sequence, token p + 2 = token p + 3 mod 10."""
    model = small("qwen3")
    head = MTPHead(model, seed=3)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        first, second = torch.randint(10, (2, 16), generator=generator)
        ids = torch.stack([(first, second)[p % 2] + 3 * (p // 2) for p in range(10)], dim=1) % 10
        mask = torch.ones_like(ids)
        loss = -head_log_probs(head, model, ids, mask, states_of(model, ids, mask), 8, 1.0, detached=True).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3  # chance: log 10 = 2.3
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_weights_of_a_head_follow_from_the_seed_and_leave_the_random_state():
    model = small("qwen3")
    before = torch.random.get_rng_state()
    first, second, other = MTPHead(model, seed=3), MTPHead(model, seed=3), MTPHead(model, seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.projection.weight, other.projection.weight)
    names = {name.split(".")[0] for name, _ in first.named_parameters()}
    assert names == {"block", "projection", "state_norm", "embedding_norm"}
    layer = sum(p.numel() for p in model.base_model.layers[-1].parameters())
    assert sum(p.numel() for p in first.parameters()) == layer + 2 * 16 * 16 + 3 * 16  # M and three norms


# ---- lambda

D = torch.tensor([[0.1, -0.2, 9.0], [0.3, 0.0, 9.0]])
D_HEAD = torch.tensor([[0.2, -0.1, -9.0], [0.1, 0.4, 9.0]])
OWN = torch.tensor([[True, True, False], [True, True, False]])


def test_lambda_is_a_ratio_of_sums_over_own_tokens():
    c, v2, d2 = products(D, D_HEAD, OWN).tolist()
    # c = 0.02 + 0.02 + 0.03 + 0 = 0.07; v2 = 0.04 + 0.01 + 0.01 + 0.16 = 0.22; d2 = 0.01 + 0.04 + 0.09 = 0.14
    assert (c, v2, d2) == pytest.approx((0.07, 0.22, 0.14))
    assert ratio_of_sums(c, v2, 1.0, 1e-8, None) == pytest.approx(0.07 / 0.22)
    assert ratio_of_sums(c, v2, 2.0, 0.03, None) == pytest.approx(2 * 0.07 / 0.25)
    assert ratio_of_sums(c, v2, 1.0, 1e-8, 0.1) == 0.1
    c, v2, _ = products(-D, D_HEAD, OWN).tolist()
    assert ratio_of_sums(c, v2, 1.0, 1e-8, None) == pytest.approx(-0.07 / 0.22)  # where they move apart
    assert ratio_of_sums(c, v2, 1.0, 1e-8, 0.1) == -0.1
    assert ratio_of_sums(*products(0 * D, D_HEAD, OWN)[:2].tolist(), 1.0, 1e-8, None) == 0
    assert ratio_of_sums(0.0, 0.0, 1.0, 1e-8, None) == 0


def test_lambda_of_two_halves_of_a_batch_is_that_of_the_whole():
    parts = products(D[:1], D_HEAD[:1], OWN[:1]) + products(D[1:], D_HEAD[1:], OWN[1:])
    torch.testing.assert_close(parts, products(D, D_HEAD, OWN))


def test_lambda_of_the_authors_code_is_a_mean_of_ratios_over_all_positions():
    ratios, positions = mean_of_ratios(D, D_HEAD, 1e-8).tolist()
    # 0.5 + 2 - 1 + 3 + 0 + 1 = 5.5 of six positions, the masked ones among them
    assert (ratios / positions) == pytest.approx(5.5 / 6, abs=1e-5)
    assert mean_of_ratios(torch.zeros(2, 3), D_HEAD, 1e-8)[0] == 0


# ---- the loss


def test_a_clipped_ratio_has_no_gradient_where_the_advantage_pushes_it_further():
    log_ratios = torch.tensor([[0.5, 0.5, -0.5, -0.5, 0.1]], requires_grad=True)
    loss = clipped(log_ratios, torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]]), 0.2, 0.28)
    expected = [-1.28, math.exp(0.5), -math.exp(-0.5), 0.8, -2 * math.exp(0.1)]
    assert loss[0].tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert log_ratios.grad[0].tolist() == pytest.approx([0, math.exp(0.5), -math.exp(-0.5), 0, -2 * math.exp(0.1)])


def test_losses_are_aggregated_as_their_types_say():
    per_token, own = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    found = {kind: float(aggregated(per_token, own, kind, 10, 5.0)) for kind in ("grpo", "bnpo", "dr_grpo", "dapo")}
    assert found == pytest.approx({"grpo": (1.5 + 4) / 2, "bnpo": 7 / 3, "dr_grpo": 7 / 20, "dapo": 7 / 5})


# ---- refusals


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (dict(mode="ocd"), ("mode=ocd", "Try mode=detach")),
        (dict(mode="ce", weight=0), ("weight=0", "Try weight=0.1")),
        (dict(mode="occ", limit=-1), ("limit=-1", "Try limit=1")),
        (dict(mode="occ", eps=0), ("eps=0", "Try eps=1e-08")),
        (dict(mode="occ", warmup=1.5), ("warmup=1.5", "whole number")),
        (dict(mode="occ", ratio_to="base"), ("ratio_to=base", "Try ratio_to=main")),
        (dict(mode="occ", weights="shiped"), ("weights=shiped", "Try weights=fresh")),
    ],
)
def test_values_out_of_range_are_refused(options, texts):
    with pytest.raises(ValueError) as refused:
        MultiTokenPrediction(**options)
    assert all(text in str(refused.value) for text in texts)


def test_an_architecture_that_no_head_was_built_for_is_refused():
    refuse_architecture("qwen3")
    with pytest.raises(ValueError, match="model_type=gemma3: an auxiliary head is one more layer"):
        refuse_architecture("gemma3")
