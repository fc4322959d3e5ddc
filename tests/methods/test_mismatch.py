"""Tests the mismatch of trainer and sampler on tensors whose numbers can be worked out by hand."""

import math

import pytest
import torch

from otb.methods.mismatch import LARGEST, mismatch_metrics
from otb.records.metric_names import METRICS

NAN = float("nan")


def test_mismatch_of_two_rollouts_is_what_is_worked_out_by_hand():
    log = math.log
    # ratios trained / sampled: first rollout 2, 1/2, 4; second 1/2. A third rollout has no own token.
    r = torch.tensor([[log(2), -log(2), log(4)], [-log(2), 9.0, 9.0], [9.0, 9.0, 9.0]])
    own = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert mismatch_metrics(r, own) == pytest.approx(
        {
            "log_ppl_abs_diff_mean": (2 * log(2) / 3 + log(2)) / 2,  # |(1 - 1 + 2) log 2 / 3|, |-log 2|
            "log_ppl_abs_diff_max": log(2),
            "mismatch_kl": -log(2) / 4,  # minus (1 - 1 + 2 - 1) log 2 over 4 tokens
            "mismatch_k3": (7 - log(2)) / 4 - 1,  # ratios sum to 2 + 1/2 + 4 + 1/2, their logs to log 2
            "mismatch_chi2_token": (4 + 1 / 4 + 16 + 1 / 4) / 4 - 1,
            "mismatch_chi2_seq": (4**2 + (1 / 2) ** 2) / 2 - 1,  # products 2 x 1/2 x 4 = 4, and 1/2
        }
    )
    assert mismatch_metrics(r, own).keys() <= METRICS.keys()


def test_equal_log_probs_have_no_mismatch():
    assert set(mismatch_metrics(torch.zeros(2, 3), torch.ones(2, 3).bool()).values()) == {0.0}


def test_tokens_without_a_log_prob_and_masked_ones_change_nothing():
    r = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    own = torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
    widened = torch.cat([r.masked_fill(~own, NAN), torch.full((4, 2), NAN)], dim=1)
    every = torch.ones(4, 8).bool()
    assert mismatch_metrics(widened, every) == pytest.approx(mismatch_metrics(r, own))


def test_nothing_is_measured_where_no_token_is_left():
    assert mismatch_metrics(torch.zeros(2, 0), torch.zeros(2, 0).bool()) == {}
    assert mismatch_metrics(torch.full((1, 2), NAN), torch.ones(1, 2).bool()) == {}


def test_ratios_that_no_exponential_holds_stay_finite():
    found = mismatch_metrics(torch.full((1, 3), 900.0), torch.ones(1, 3).bool())
    assert found["mismatch_chi2_seq"] == pytest.approx(math.exp(2 * LARGEST))
    assert found["mismatch_kl"] == -900.0
