"""Tests token weights: their mathematics on small tensors, a baseline's bias under them, and what is refused."""

import math
from itertools import product

import pytest
import torch
from torch import tensor

from experiments.running.identity import difference
from otb.methods.token_weights import (
    MEASURES,
    TokenWeights,
    entropy_reductions,
    residuals,
    weighted_norms,
)
from otb.metrics import effective_support, gini, token_weight_metrics
from otb.records.metric_names import METRICS

OWN = tensor([[True, True, True, True], [True, True, False, False]])


# ---- factors


def test_factors_are_the_shares_of_the_signal_times_the_own_tokens():
    # shares 1/8, 2/8, 5/8, 0 of four tokens; 3/4 and 1/4 of two
    signals = tensor([[1.0, 2.0, 5.0, 0.0], [6.0, 2.0, 9.0, 9.0]])
    factors = TokenWeights("arca", eps=0.0).factors(signals, OWN)
    torch.testing.assert_close(factors, tensor([[0.5, 1.0, 2.5, 0.0], [1.5, 0.5, 0.0, 0.0]]))
    # p = 2: shares of 1, 4, 25, 0 and of 36, 4
    squared = TokenWeights("arca", power=2.0, eps=0.0).factors(signals, OWN)
    torch.testing.assert_close(squared, tensor([[4 / 30, 16 / 30, 100 / 30, 0.0], [1.8, 0.2, 0.0, 0.0]]))
    # eps = 1: shares of 2, 3, 6, 1 and of 7, 3
    raised = TokenWeights("arca", eps=1.0).factors(signals, OWN)
    torch.testing.assert_close(raised, tensor([[8 / 12, 1.0, 2.0, 4 / 12], [1.4, 0.6, 0.0, 0.0]]))


def test_factors_have_mean_1_over_own_tokens_and_do_not_change_with_the_scale_of_the_adapter():
    torch.manual_seed(0)
    own = torch.arange(50) < torch.randint(1, 51, (20, 1))
    signals = torch.rand(20, 50)
    factors = TokenWeights("arca", power=1.7).factors(signals, own)
    torch.testing.assert_close(factors.sum(1), own.sum(1).float())
    assert factors[~own].eq(0).all()
    torch.testing.assert_close(TokenWeights("arca", power=1.7).factors(signals * 1000, own), factors)


@pytest.mark.parametrize("signal", ["arca", "surprisal", "entropy_reduction", "divergence"])
@pytest.mark.parametrize("normalise", ["trajectory", "running"])
def test_rollouts_without_a_signal_are_weighted_uniformly_and_exactly(signal, normalise):
    """The first step of every run with LoRA is such a case: B = 0, so the adapter has not moved anything."""
    weights = TokenWeights(signal, power=2.0, normalise=normalise)
    own = torch.arange(49) < tensor([[49], [7], [0]])
    assert torch.equal(weights.factors(torch.zeros(3, 49), own), own.float())


def test_a_signal_at_one_token_gives_it_the_whole_weight():
    factors = TokenWeights("arca").factors(tensor([[0.0, 0.3, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0]]), OWN)
    torch.testing.assert_close(factors, tensor([[0.0, 4.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_uniform_weights_are_one_factor_of_1_per_rollout():
    assert torch.equal(TokenWeights("uniform").factors(None, OWN), torch.ones(2, 1))


# ---- signals


def test_signals_are_what_their_names_say():
    log_probs, base = tensor([[-0.5, -2.0, 0.0, -1.0]]), tensor([[-0.7, -1.0, 0.0, -1.0]])
    own = torch.ones(1, 4, dtype=torch.bool)
    assert torch.equal(TokenWeights("surprisal").signals(log_probs, own), tensor([[0.5, 2.0, 0.0, 1.0]]))
    divergence = TokenWeights("divergence").signals(log_probs - base, own)
    torch.testing.assert_close(divergence, tensor([[0.2, 1.0, 0.0, 0.0]]))
    norms = residuals(tensor([[[3.0, 4.0], [1.0, 1.0]]]), tensor([[[0.0, 0.0], [1.0, 1.0]]]))
    assert torch.equal(TokenWeights("arca").signals(norms, own[:, :2]), tensor([[5.0, 0.0]]))


def test_residuals_of_bfloat16_states_are_subtracted_in_float32():
    states, base = (tensor([[[value]]]).bfloat16() for value in (256.0, 1.0078125))
    assert residuals(states, base).item() == 254.9921875  # 255 in bfloat16


def test_entropy_is_reduced_by_the_next_own_token_and_not_past_the_last():
    entropies = tensor([[2.0, 0.5, 1.0, 0.0], [1.0, 0.4, 0.0, 0.0]])
    # 2 - 0.5; 0.5 - 1 is below 0; 1 - 0, as the last own token is certain; 0 at the last. The second: 1 - 0.4; 0.
    expected = tensor([[1.5, 0.0, 1.0, 0.0], [0.6, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy_reductions(entropies, OWN), expected)
    assert entropy_reductions(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


def test_energy_of_weighted_tokens_carries_the_square_of_the_factor():
    w, factors = tensor([[1.0, 0.5]]), tensor([[0.5, 1.5]])
    assert torch.equal(weighted_norms(w, factors), tensor([[0.25, 1.125]]))
    assert weighted_norms(w, None) is w


# ---- how unequal they are


def test_gini_and_support_of_known_weights():
    own = torch.ones(4, dtype=torch.bool)
    even, single, ramp = torch.ones(4), tensor([0.0, 4.0, 0.0, 0.0]), tensor([4.0, 1.0, 3.0, 2.0])
    assert [gini(each, own).item() for each in (even, single)] == [0.0, 0.75]  # (n - 1) / n
    assert gini(ramp, own).item() == (-3 * 1 - 1 * 2 + 1 * 3 + 3 * 4) / (4 * 10)
    assert [effective_support(each, own).item() for each in (even, single)] == [1.0, 0.25]
    assert effective_support(ramp, own).item() == pytest.approx(10**2 / (4 * 30))


def test_gini_and_support_count_own_tokens_alone():
    weights, own = tensor([[0.0, 9.0, 2.0, 9.0], [9.0, 9.0, 9.0, 9.0]]), tensor([[1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    assert gini(weights, own)[0] == 0.5 and effective_support(weights, own)[0] == 0.5
    assert gini(weights, own)[1].isnan() and effective_support(weights, own)[1].isnan()


def test_metrics_are_means_over_rollouts_and_over_own_tokens():
    own = tensor([[[True, True], [True, False], [False, False]]])
    signals, factors = tensor([[[3.0, 1.0], [2.0, 0.0], [0.0, 0.0]]]), tensor([[[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    assert token_weight_metrics(signals, factors, own) == {
        "token_weight_gini": (0.5 + 0) / 2,
        "token_weight_support": (0.5 + 1) / 2,
        "token_weight_mean": 1.0,
        "token_signal_mean": 2.0,
        "token_signal_max": 3.0,
    }
    assert token_weight_metrics(signals, factors, own).keys() <= METRICS.keys()
    assert token_weight_metrics(signals, factors, torch.zeros_like(own)) == {}


# ---- the running mean


def test_running_factors_are_divided_by_the_mean_of_earlier_steps():
    weights = TokenWeights("arca", eps=0.0, normalise="running", decay=0.5)
    signals = tensor([[1.0, 2.0, 3.0, 2.0], [4.0, 0.0, 7.0, 7.0]])
    assert torch.equal(weights.factors(signals, OWN), OWN.float())  # no step has been seen yet
    weights.update(torch.zeros_like(signals), OWN)  # a step without a signal teaches nothing
    assert torch.equal(weights.factors(signals, OWN), OWN.float())
    weights.update(signals, OWN)  # sum 12 of 6 tokens
    torch.testing.assert_close(weights.factors(signals, OWN), signals / 2 * OWN)
    weights.update(3 * signals, OWN)  # (12 / 2 + 36) / (6 / 2 + 6)
    torch.testing.assert_close(weights.factors(signals, OWN), signals * 9 / 42 * OWN)


def test_running_mean_goes_on_from_its_state_and_trajectories_have_none():
    weights, other = (TokenWeights("arca", normalise="running") for _ in range(2))
    signals = torch.rand(2, 4)
    weights.update(signals, OWN)
    other.load_state_dict(weights.state_dict())
    assert torch.equal(other.factors(signals, OWN), weights.factors(signals, OWN))
    trajectory = TokenWeights("arca")
    trajectory.update(signals, OWN)
    assert trajectory.state_dict() == {"sum": 0.0, "count": 0.0}


# ---- bias: two tokens of a vocabulary of two, every response enumerated


FIRST, SECOND = 0.3, (0.6, 0.2)  # P(token 1 = 1); P(token 2 = 1) after token 1 = 0, 1
RESIDUALS = (0.5, (0.2, 1.4))  # of the states that predict token 1, and token 2 after token 1 = 0, 1


def bias_of_a_baseline(weights: TokenWeights) -> list[float]:
    """Returns E[sum_t f_t B_t d log pi_t / d logit] with B = 1 for the three logits: the bias of a baseline."""
    signals, probabilities, scores = [], [], []
    for first, second in product((0, 1), repeat=2):
        chances = [FIRST if first else 1 - FIRST, SECOND[first] if second else 1 - SECOND[first]]
        score = [[first - FIRST, 0.0, 0.0], [0.0, 0.0, 0.0]]
        score[1][1 + first] = second - SECOND[first]  # d log pi / d logit = y - P(1)
        measured = {"arca": [RESIDUALS[0], RESIDUALS[1][first]], "surprisal": [-math.log(c) for c in chances]}
        signals.append(measured[weights.signal])
        probabilities.append(math.prod(chances))
        scores.append(score)
    own = torch.ones(4, 2, dtype=torch.bool)
    signals, probabilities, scores = (tensor(each, dtype=torch.float64) for each in (signals, probabilities, scores))
    factors = weights.factors(signals, own)
    return torch.einsum("i,it,itd->d", probabilities, factors, scores).tolist()


def running(signal: str) -> TokenWeights:
    weights = TokenWeights(signal, normalise="running")
    weights.update(tensor([[0.4, 0.9]]), torch.ones(1, 2, dtype=torch.bool))
    return weights


def test_trajectory_normalisation_makes_a_constant_baseline_biased():
    # f_1 = 2 x 0.5 / (0.5 + 1.4) if token 1 is 1, else 2 x 0.5 / (0.5 + 0.2).
    # E[f_1 s_1] = 0.3 x 0.7 x (1 / 1.9 - 1 / 0.7).
    # Token 1 determines f_2 through the prefix, so only the first logit has a bias.
    bias = bias_of_a_baseline(TokenWeights("arca", eps=0.0))
    assert bias == pytest.approx([0.3 * 0.7 * (1 / 1.9 - 1 / 0.7), 0, 0], abs=1e-6)
    assert abs(bias[0]) > 0.18


def test_running_normalisation_leaves_a_baseline_unbiased_where_the_signal_is_of_the_prefix():
    assert bias_of_a_baseline(running("arca")) == pytest.approx([0, 0, 0], abs=1e-9)
    assert bias_of_a_baseline(TokenWeights("arca", normalise="running")) == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("weights", [TokenWeights("surprisal"), running("surprisal")])
def test_a_signal_of_the_token_itself_makes_a_baseline_biased_with_either_normaliser(weights):
    assert max(map(abs, bias_of_a_baseline(weights))) > 0.1


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(signal="arcs"), "signal=arcs is not one of uniform, "),
        (dict(signal="arca", power=0), "power=0 must be above 0"),
        (dict(signal="arca", power=math.nan), "power=nan must be above 0"),
        (dict(signal="arca", eps=-1e-8), "eps=-1e-08 must be a number >= 0"),
        (dict(signal="arca", decay=1.5), "decay=1.5 must be in"),
        (dict(signal="arca", normalise="batch"), "normalise=batch is not one of trajectory, running"),
        (dict(signal="surprisal", states="pre_norm"), "states=pre_norm says which hidden states signal=arca compares"),
    ],
)
def test_weights_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        TokenWeights(**arguments)


def test_runs_from_before_there_were_weights_are_the_runs_without_them():
    assert difference({"seed": 0}, {"seed": 0, "token_weights": {"_target_": None}}) == []
    assert difference({"seed": 0}, {"seed": 0, "token_weights": {"signal": "arca"}}) != []


def test_every_signal_says_what_it_costs():
    assert {signal: TokenWeights(signal).reads_base for signal in MEASURES} == {
        "uniform": False,
        "surprisal": False,
        "entropy_reduction": False,
        "divergence": True,
        "arca": True,
    }
