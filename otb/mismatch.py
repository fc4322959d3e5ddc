"""Measures how far the policy that trains is from the sampler: statistics of r = log pi_trained - log pi_sampled.

Sampler and trainer hold the same weights, but compute in other kernels or another precision. The definitions are those
of `rollout_corr_helper.py` of verl. OTBTrainer calls it wherever the sampler's log-probs are known.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 20.0  # |log ratio|, verl's bound: beyond it an exponential says no more than "far"


def mismatch_metrics(log_ratio: Tensor, own: Tensor) -> dict[str, float]:
    """Returns the mismatch of a batch of rollouts under its names in `otb.metric_names.METRICS`.

    log_ratio: (B, T) log pi of the policy that trains minus the sampler's; NaN where the sampler gave no log-prob.
    own: (B, T) bool, True = own token that counts. Tokens of other rollouts are left out, and rollouts without a token.
    -> nothing where no token is left.

    log_ppl_abs_diff_*: |mean_t r_t| of each rollout, mean and largest. mismatch_kl = mean(-r), an estimate of
    KL(sampler, trained); mismatch_k3 = mean(exp(r) - r - 1), the same and never negative. mismatch_chi2_token =
    mean(exp(2 r)) - 1, mismatch_chi2_seq = mean over rollouts of exp(2 sum_t r_t) - 1.
    """
    counts = own & ~log_ratio.isnan()
    r = log_ratio.double().masked_fill(~counts, 0.0)
    tokens = counts.sum(1)
    r, counts, tokens = r[tokens > 0], counts[tokens > 0], tokens[tokens > 0]
    if not len(r):
        return {}
    of_tokens = r[counts].clamp(-LARGEST, LARGEST)
    of_rollouts = r.sum(1).clamp(-LARGEST, LARGEST)
    log_ppl = (r.sum(1) / tokens).abs()
    values = {
        "log_ppl_abs_diff_mean": log_ppl.mean(),
        "log_ppl_abs_diff_max": log_ppl.max(),
        "mismatch_kl": -r[counts].mean(),
        "mismatch_k3": (torch.expm1(of_tokens) - of_tokens).mean(),
        "mismatch_chi2_token": torch.expm1(2 * of_tokens).mean(),
        "mismatch_chi2_seq": torch.expm1(2 * of_rollouts).mean(),
    }
    return {name: value.item() for name, value in values.items()}
