"""Forecasts the noise of estimators relative to RLOO from rewards and score norms alone, without a gradient.

    noise(estimator) / noise(RLOO)  ~  (E[sum_t w_t A_t^2] / c^2) / E[sum_t w_t (A_t of RLOO)^2]

The expectation is over random partitions of a prompt's rollouts into groups of N. c is the scale of an estimator: 1 if
it declares itself unbiased, else the slope of its mean advantage on the centred reward, relative to RLOO's slope. Every
rollout counts alike in the slope: weighing by energy would give `none` a scale far below 1.

The forecast is exact where scores of different tokens are orthogonal, ||s_t||^2 is proportional to w_t, and the true
gradient is small beside its noise. Known limits:
- Exact norms may be larger relative to w in wrong rollouts than in right ones, or the reverse. This shifts whatever
  moves the baseline towards 0, `none` most of all.
- The slope underestimates the scale of estimators that weigh whole rollouts by energy, so their forecast is too high.
- GRPO divides by a deviation that differs between prompts; at large N the sum over prompts should be weighed by signal.
- Bias of the direction and the variance between prompts are not in it, nor are baselines that learn over the steps.
- Where a prompt has only N rollouts, as in the records of a run, the slope is centred on their own mean and is rougher.

experiments/measuring/forecasting.py calls it; energies.py reads further facts off the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from otb import baselines
from otb.advantages import advantages
from otb.laboratory.estimators import per_rollout
from otb.laboratory.moments import partitions
from otb.laboratory.statistics import RESAMPLES, interval_columns, resampled
from otb.rollouts import RolloutGroups

REFERENCE = "rloo"
NUMBERS_AT_ONCE = 8_000_000  # advantages of a chunk of partitions: 32 MB


@dataclass(frozen=True)
class ScoredRollouts:
    """The M scored rollouts of one prompt: rewards (M,), own tokens (M,) int, score norms (M, T), 0 past the last."""

    rewards: Tensor
    lengths: Tensor
    score_norms: Tensor

    def __post_init__(self):
        if self.rewards.isnan().any():
            raise ValueError("Unscored rollouts (reward NaN) have no advantage. Leave them out.")

    @property
    def mean_advantage_weights(self) -> Tensor:
        """(M, T): weights of the mean over a rollout's own tokens; all 0 for a rollout without any."""
        own = torch.arange(self.score_norms.shape[1]) < self.lengths.unsqueeze(1)
        return own / self.lengths.clamp(min=1).unsqueeze(1)

    @property
    def energy(self) -> Tensor:
        """(M,): realized energy W_T of the whole rollout."""
        return self.score_norms.sum(-1)


def forecast(
    prompts: list[ScoredRollouts],
    estimators: Mapping[str, Callable],
    sizes: list[int],
    count: int = 16,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """Returns a row per estimator and group size: the forecast with its 95 % bootstrap interval over prompts.

    estimators: name -> baseline that `reads_probabilities_alone`, `rloo` among them. sizes: N. count: random partitions
    of each prompt's rollouts. Prompts with fewer than N rollouts are left out at that size.
    -> estimator, group_size, prompts, unbiased (None: no claim), scale c, forecast with _low and _high, and
    self_inclusion: the share of the gain 1 - forecast that is lost by NAME_loo, NaN without one or without a gain.
    All estimators share their resamples, so ratios are paired. A forecast is NaN where c or RLOO's energy is not
    positive.
    """
    rows = []
    for size in sizes:
        chosen = [(index, prompt) for index, prompt in enumerate(prompts) if len(prompt.rewards) >= size]
        if not chosen:
            continue
        terms = [prompt_terms(prompt, estimators, size, count, seed + index) for index, prompt in chosen]
        weights = resampled(len(chosen), seed, resamples)
        sums = {name: weights @ np.array([of_prompt[name] for of_prompt in terms]) for name in estimators}
        unbiased = {name: baselines.is_unbiased(baseline) for name, baseline in estimators.items()}
        rows += [{"group_size": size, "prompts": len(chosen), **row} for row in _ratios(sums, unbiased)]
    table = pd.DataFrame([interval_columns(row) for row in rows])
    return table.assign(self_inclusion=_self_inclusion(table)) if len(table) else table


def prompt_terms(
    prompt: ScoredRollouts, estimators: Mapping[str, Callable], size: int, count: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Returns, per estimator, E[sum_t w_t A_t^2] of a rollout and the mean of (R - mean R) times its mean advantage."""
    members = partitions(len(prompt.rewards), size, count, torch.Generator().manual_seed(seed), least=1)
    centred = prompt.rewards - prompt.rewards.mean()  # (M,)
    mean_weights = prompt.mean_advantage_weights
    at_once = max(1, NUMBERS_AT_ONCE // max(1, prompt.score_norms.numel()))
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in estimators}
    for some in members.split(at_once):
        index = some.flatten(0, 1)
        rollouts = RolloutGroups(prompt.rewards[index], prompt.lengths[index], prompt.score_norms[index])
        for name, baseline in estimators.items():
            advantage = per_rollout(advantages(rollouts, baseline(rollouts)), some, len(prompt.rewards))  # (K, M, T|1)
            energy = (prompt.score_norms * advantage.square()).sum(-1)  # (K, M)
            mean_advantage = (mean_weights * advantage).sum(-1)
            sums[name] += torch.stack([energy.double().sum(), (centred * mean_advantage).double().sum()])
    return {name: tuple((total / members.numel()).tolist()) for name, total in sums.items()}


def _ratios(sums: dict[str, np.ndarray], unbiased: dict[str, bool | None]) -> list[dict]:
    """Returns scale and forecast of each estimator, (1 + resamples,). sums: (1 + resamples, 2), energy and slope."""
    energy_of_reference, slope_of_reference = sums[REFERENCE].T
    rows = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, (energy, slope) in ((name, total.T) for name, total in sums.items()):
            scale = np.ones_like(slope) if unbiased[name] else slope / slope_of_reference
            known = (energy_of_reference > 0) & (scale > 0)
            ratio = np.where(known, energy / scale**2 / energy_of_reference, np.nan)
            rows.append({"estimator": name, "unbiased": unbiased[name], "scale": float(scale[0]), "forecast": ratio})
    return rows


def _self_inclusion(table: pd.DataFrame) -> list[float]:
    """Returns the share of each row's gain that its leave-one-out form loses; NaN without such a form or a gain."""
    names, sizes, forecasts = (table[name].tolist() for name in ("estimator", "group_size", "forecast"))
    found = dict(zip(zip(names, sizes, strict=True), forecasts, strict=True))
    shares = []
    for (name, size), with_itself in found.items():
        without = found.get((f"{name}_loo", size), np.nan)
        shares.append((without - with_itself) / (1 - with_itself) if with_itself < 1 else np.nan)
    return shares
