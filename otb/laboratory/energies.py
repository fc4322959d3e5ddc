"""Reads off rewards and score norms what a token baseline could gain, and where rollouts spend their energy.

V(B) = E[sum_t w_t (R - B_t)^2] is the token-diagonal variance of a baseline that depends on the prompt and on t alone.
The best number is E[W_T R] / E[W_T], the best function of t is E[w_t R] / E[w_t]. experiments/measuring/forecasting.py
calls it, beside forecast.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otb.laboratory.forecast import ScoredRollouts
from otb.laboratory.statistics import interval_columns, resampled

PIECES = (1, 2, 4, 8, 16, 32)  # of the response, with a number each: the functions of t that are fitted
FEWEST_ROLLOUTS = 16  # of a prompt, to fit on half of them
SPLITS = 8  # random halvings of a prompt's rollouts, over which V is averaged
FIFTHS = 5


def headroom(prompts: list[ScoredRollouts], seed: int = 0) -> dict[str, float]:
    """Returns what the best number and the best function of t leave of the mean's V, with intervals over prompts.

    number, token: fitted on one half of each prompt's rollouts and judged on the other, both ways. The function of t is
    a number for each of `pieces` parts of the response that have equal energy; their count, the same for all prompts,
    is the one with the least V, 1 among them. token_gain: 1 - token / number, with _low and _high. token_gain_most: the
    same with a number for every t, fitted and judged on the same rollouts; noise makes it too large.
    {} if no prompt has `FEWEST_ROLLOUTS` rollouts and different rewards.
    """
    usable = [p for p in mixed(prompts) if len(p.rewards) >= FEWEST_ROLLOUTS and p.energy.sum() > 0]
    if not usable:
        return {}
    generator = torch.Generator().manual_seed(seed)
    values = np.array([_cross_fitted(prompt, generator) for prompt in usable])  # (P, 1 + pieces): the mean first
    same = np.array([_in_sample(prompt) for prompt in usable])  # (P, 2): number, function of t
    best = 1 + int(values.sum(0)[1:].argmin())
    sums, in_sample = resampled(len(usable), seed) @ values, same.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = interval_columns(
            {
                "prompts": len(usable),
                "number": sums[:, 1] / sums[:, 0],
                "token": sums[:, best] / sums[:, 0],
                "token_gain": 1 - sums[:, best] / sums[:, 1],
                "token_gain_most": 1 - in_sample[1] / in_sample[0],
            }
        )
    return columns | {"pieces": PIECES[best - 1]}


def mixed(prompts: list[ScoredRollouts]) -> list[ScoredRollouts]:
    """Returns the prompts whose rollouts have different rewards."""
    return [prompt for prompt in prompts if prompt.rewards.min() < prompt.rewards.max()]


def _cross_fitted(prompt: ScoredRollouts, generator: torch.Generator) -> list[float]:
    """Returns V of the mean reward and of the best function with each of PIECES, fitted on the other half."""
    halves = [torch.randperm(len(prompt.rewards), generator=generator).tensor_split(2) for _ in range(SPLITS)]
    totals = np.zeros(1 + len(PIECES))
    for fit, judge in [*halves, *(halved[::-1] for halved in halves)]:
        w, rewards = prompt.score_norms[fit].double(), prompt.rewards[fit].double()
        fitted = [rewards.mean().expand(w.shape[1]), *(best_function(w, rewards, pieces) for pieces in PIECES)]
        judged = prompt.score_norms[judge].double(), prompt.rewards[judge].double()
        totals += [variance(*judged, baseline) for baseline in fitted]
    return totals.tolist()


def _in_sample(prompt: ScoredRollouts) -> list[float]:
    w, rewards = prompt.score_norms.double(), prompt.rewards.double()
    return [variance(w, rewards, best_function(w, rewards, pieces)) for pieces in (1, w.shape[1])]


def best_function(w: Tensor, rewards: Tensor, pieces: int) -> Tensor:
    """Returns the best B_t that is constant on each of `pieces` parts of equal energy. w (M, T), rewards (M,) -> (T,).

    With as many pieces as tokens every t has its own number. A part without energy has the best single number.
    """
    energy, weighted = w.sum(0), rewards @ w  # (T,)
    if pieces >= w.shape[1]:
        part = torch.arange(w.shape[1])
    else:
        middle = (energy.cumsum(0) - energy / 2) / energy.sum().clamp(min=1e-30)
        part = (middle * pieces).long().clamp(0, pieces - 1)
    empty = energy.new_zeros(max(pieces, w.shape[1]))
    in_part, weighted_in_part = empty.index_add(0, part, energy), empty.index_add(0, part, weighted)
    single = weighted.sum() / energy.sum().clamp(min=1e-30)
    return torch.where(in_part > 0, weighted_in_part / in_part, single)[part]


def variance(w: Tensor, rewards: Tensor, baseline: Tensor) -> float:
    """Returns the mean over rollouts of sum_t w_t (R - B_t)^2. w (M, T), rewards (M,), baseline (T,)."""
    return float((w * (rewards.unsqueeze(1) - baseline).square()).sum(-1).mean())


def energy_contrast(prompts: list[ScoredRollouts], seed: int = 0) -> dict:
    """Returns where rollouts above and below their prompt's mean reward spend energy, over prompts that have both.

    above, below: mean W_T. ratio: above / below with _low and _high over prompts. above_fifths, below_fifths: mean
    energy in each fifth of the response, (5,). with_reward, with_length: mean over prompts of the correlation of W_T
    with the reward and with the length; NaN if constant. Right and wrong rollouts where the reward is 1 or 0.
    {} if all prompts have equal rewards.
    """
    both = mixed(prompts)
    if not both:
        return {}
    sides = [prompt.rewards > prompt.rewards.mean() for prompt in both]
    fifths = [energy_by_fifth(prompt) for prompt in both]  # (M, 5)
    above, below = (
        np.array([of[is_above == wanted].mean(0).tolist() for of, is_above in zip(fifths, sides, strict=True)])
        for wanted in (True, False)
    )  # (P, 5) each
    weights = resampled(len(both), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (weights @ above.sum(1)) / (weights @ below.sum(1))
    found = {
        "prompts": len(both),
        "above": float(above.sum(1).mean()),
        "below": float(below.sum(1).mean()),
        "ratio": np.where(np.isfinite(ratio), ratio, np.nan),
        "with_reward": mean_correlation([(prompt.energy, prompt.rewards) for prompt in both]),
        "with_length": mean_correlation([(prompt.energy, prompt.lengths) for prompt in both]),
    }
    profiles = {"above_fifths": above.mean(0).tolist(), "below_fifths": below.mean(0).tolist()}
    return interval_columns(found) | profiles


def energy_by_fifth(prompt: ScoredRollouts) -> Tensor:
    """Returns the energy that each rollout spends in each fifth of its own tokens, (M, 5), in float64."""
    w = prompt.score_norms.double()
    t = torch.arange(w.shape[1]).expand_as(w)
    fifth = (FIFTHS * t // prompt.lengths.clamp(min=1).unsqueeze(1)).clamp(max=FIFTHS - 1)
    return w.new_zeros(len(w), FIFTHS).scatter_add(1, fifth, w)


def mean_correlation(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the mean of Pearson's correlations, of the pairs that have one; NaN if none has."""
    found = [float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1]) for x, y in pairs]
    known = [value for value in found if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")
