"""Computes squared score norms from forward probabilities alone: the logit-gradient proxy of the paper.

The trainer calls it with the log-probabilities and log sum pi^2 that TRL's fused LM head returns; the variance
laboratory and the conformance check call it too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_sum_squared_probs(logits: Tensor) -> Tensor:
    """Returns log sum_v pi_v^2 = logsumexp(2z) - 2 logsumexp(z). logits (..., V), temperature applied -> (...)."""
    return torch.logsumexp(2 * logits, dim=-1) - 2 * torch.logsumexp(logits, dim=-1)


def logit_gradient_proxy(log_probs: Tensor, log_sum_sq_probs: Tensor) -> Tensor:
    """Returns w = 1 - 2 pi + sum pi^2 = ||e_y - pi||^2, the squared norm of d log pi(y) / d logits; in [0, 2].

    log_probs, log_sum_sq_probs (...), natural logarithms at the sampling temperature -> (...), float32 at least.
    It is computed as (1 - pi)^2 + (sum pi^2 - pi^2), where both terms are non-negative. The literal form cancels to
    small negative numbers near pi = 1, which would push a weighted mean out of its range (docs/choices.md).
    """
    log_probs = log_probs if log_probs.dtype == torch.float64 else log_probs.float()  # the 8 bits of bf16 are too few
    others = log_sum_sq_probs.to(log_probs.dtype).exp() - (2 * log_probs).exp()  # sum over v != y of pi_v^2
    return log_probs.expm1().square() + others.clamp(min=0)
