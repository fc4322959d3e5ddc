"""Computes unbiased statistics of an estimator's group gradient, and intervals over prompts.

g is the gradient of one prompt group: the mean over its rollouts of sum_t A_t s_t. mu = E[R sum_t s_t] is the true
gradient of the prompt. All four moments are U-statistics: products of gradients that share no rollout. A plug-in such
as ||mean of g||^2 would count noise as signal.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

MOMENTS = ("power", "signal", "overlap", "truth")
RESAMPLES = 4000
TAIL = 0.025  # left out at each end of a 95 % interval


def moments(rollout_gradients: Tensor, reference: Tensor, members: Tensor) -> dict[str, float]:
    """Returns the moments of one prompt and one estimator at one group size.

    rollout_gradients (K, M, D): sum_t A_t s_t of each of the M rollouts in each of K partitions into groups. members
    (K, n, N) int: the rollouts of the n >= 2 groups of each partition. reference (M, D): gradients with mean mu, that
    of a rollout depending on no other rollout.
    -> power E||g||^2, signal ||E g||^2, overlap <E g, mu>, truth ||mu||^2.
    """
    partitions, groups, size = members.shape
    index = members.flatten(1).unsqueeze(-1).expand(-1, -1, rollout_gradients.shape[-1])
    g = rollout_gradients.gather(1, index).unflatten(1, (groups, size)).mean(2)  # (K, n, D)
    squares, total = g.square().sum(-1), g.sum(1)
    count = len(reference)
    others = reference.sum(0) - reference[members].sum(2)  # (K, n, D): what shares no rollout with the group
    return {
        "power": squares.mean().item(),
        "signal": ((total.square().sum(-1) - squares.sum(1)) / (groups * (groups - 1))).mean().item(),
        "overlap": ((g * others).sum(-1) / (count - size)).mean().item(),
        "truth": truth(reference),
    }


def truth(reference: Tensor) -> float:
    """Returns ||mu||^2, estimated from independent gradients (M, D) with mean mu."""
    count = len(reference)
    return ((reference.sum(0).square().sum() - reference.square().sum()) / (count * (count - 1))).item()


def partitions(rollouts: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns random partitions of the rollouts into n = rollouts // size groups, (count, n, size) int."""
    groups = rollouts // size
    if groups < 2:
        raise ValueError(f"{rollouts} rollouts make fewer than two groups of {size}. Try samples={2 * size}.")
    draws = [torch.randperm(rollouts, generator=generator)[: groups * size] for _ in range(count)]
    return torch.stack(draws).unflatten(1, (groups, size))


def estimator_statistics(table: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Returns a row per estimator and group size, with 95 % bootstrap intervals over prompts (`_low`, `_high`).

    table: a row per prompt, estimator and group_size with MOMENTS. All estimators are resampled together, so that the
    ratios are paired. With sums over prompts and c = overlap / truth, the estimator's scale:
        variance           power - signal, mean over prompts
        noise              variance / (c^2 truth): noise-to-signal once the estimator is divided by its scale
        relative_noise     noise over that of rloo at the same group size
        over_probe         noise over that of energy_probe at the same group size
        scale              c
        bias               ||E g - mu||^2 / ||mu||^2
        direction_bias     1 - cos^2(E g, mu)
        energy_ratio       sum_t w_t A_t^2 / c^2 over that of the oracle, on the oracle's rollouts; no interval
        cosine             <E g, mu> / sqrt(E||g||^2 ||mu||^2): of one group's gradient with the true one
    NaN: the estimate of a denominator is not positive. KeyError: a prompt is missing for an estimator.
    """
    prompts = np.sort(table.prompt.unique())
    draws = np.random.default_rng(seed).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), RESAMPLES)
    weights = np.vstack([np.ones(len(prompts), dtype=int), draws])  # the first row is the sample itself
    rows, noises = [], {}
    for (estimator, size), part in table.groupby(["estimator", "group_size"], sort=False):
        sums = weights @ part.set_index("prompt").loc[prompts, list(MOMENTS)].to_numpy()  # (1 + RESAMPLES, 4)
        columns = statistics(dict(zip(MOMENTS, sums.T, strict=True)), len(prompts))
        noises[estimator, size] = columns["noise"]
        if "energy" in part and part.energy.notna().any():
            energy, bound = part.loc[part.energy.notna(), ["energy", "oracle_energy"]].sum()
            ratio = energy / columns["scale"][0] ** 2 / bound if bound > 0 else np.nan
            columns["energy_ratio"] = np.array([ratio])
        rows.append({"estimator": estimator, "group_size": size, "prompts": len(prompts), **columns})
    for row in rows:
        for column, against in (("relative_noise", "rloo"), ("over_probe", "energy_probe")):
            if (against, row["group_size"]) in noises:
                row[column] = row["noise"] / noises[against, row["group_size"]]
    return pd.DataFrame([interval_columns(row) for row in rows])


def statistics(sums: dict[str, np.ndarray], prompts: int) -> dict[str, np.ndarray]:
    """Returns the columns that `estimator_statistics` documents. sums: of the MOMENTS over prompts.

    NaN stands where an estimate of what must be positive is not: ||mu||^2 or ||E g||^2 is lost in the noise.
    """
    power, signal, overlap, truth = (sums[name] for name in MOMENTS)
    truth, known_signal = (np.where(estimate > 0, estimate, np.nan) for estimate in (truth, signal))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = overlap / truth
        return {
            "variance": (power - signal) / prompts,
            "noise": (power - signal) / (scale**2 * truth),
            "scale": scale,
            "bias": (signal - 2 * overlap + truth) / truth,
            "direction_bias": 1 - overlap**2 / (known_signal * truth),
            "cosine": overlap / np.sqrt(power * truth),
        }


def interval_columns(row: dict) -> dict:
    """Turns arrays (sample, resamples...) into value, _low and _high.

    There is no interval (NaN) where more of the resamples are NaN than one tail holds: they would be its widest.
    """
    columns = {}
    for name, value in row.items():
        if not isinstance(value, np.ndarray):
            columns[name] = value
            continue
        columns[name] = value[0]
        if len(value) > 1:
            unknown = np.isnan(value[1:]).mean() > TAIL
            interval = (np.nan, np.nan) if unknown else np.nanquantile(value[1:], (TAIL, 1 - TAIL))
            columns |= dict(zip((f"{name}_low", f"{name}_high"), interval, strict=True))
    return columns
