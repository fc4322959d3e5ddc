"""Turns the moments of prompts into statistics of estimators, with intervals over prompts. Imports no torch."""

from __future__ import annotations

import numpy as np
import pandas as pd

MOMENTS = ("power", "signal", "overlap", "truth")  # the keys that otb.laboratory.moments.moments returns
RESAMPLES = 4000
TAIL = 0.025  # beyond each end of a 95 % interval


def estimator_statistics(table: pd.DataFrame, seed: int = 0, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Returns a row per estimator and group size, with 95 % bootstrap intervals over prompts (`_low`, `_high`).

    table: a row per prompt, estimator and group_size with MOMENTS. All estimators use the same resamples of prompts, so
    ratios are paired. resamples: their number; with 0 there are no intervals.
    With sums over prompts and c = overlap / truth, the estimator's scale:
        variance           power - signal, mean over prompts
        noise              variance / (c^2 truth): noise-to-signal after division by the scale
        relative_noise     noise / noise of rloo at the same group size
        over_probe         noise / noise of energy_probe at the same group size
        scale              c
        bias               ||E g - mu||^2 / ||mu||^2
        direction_bias     1 - cos^2(E g, mu)
        energy_ratio       sum_t w_t A_t^2 / c^2, divided by the oracle's, on the oracle's rollouts; no interval
        cosine             <E g, mu> / sqrt(E||g||^2 ||mu||^2): cosine of one group's gradient and the true gradient
    NaN: the estimate of a denominator is not positive. KeyError: an estimator lacks a prompt.
    """
    prompts = np.sort(table.prompt.unique())
    draws = np.random.default_rng(seed).multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), resamples)
    weights = np.vstack([np.ones(len(prompts), dtype=int), draws])  # the first row is the sample itself
    rows, noises = [], {}
    for (estimator, size), part in table.groupby(["estimator", "group_size"], sort=False):
        sums = weights @ part.set_index("prompt").loc[prompts, list(MOMENTS)].to_numpy()  # (1 + resamples, 4)
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
    """Returns the columns that `estimator_statistics` documents. sums: the MOMENTS, summed over prompts.

    A column is NaN if it needs ||mu||^2 or ||E g||^2 and noise makes that estimate non-positive.
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

    The interval is NaN if more resamples are NaN than one tail holds, because these would be the extreme values.
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
