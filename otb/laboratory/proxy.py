"""Measures how well the logit-gradient proxy approximates the exact squared score norm, per token and per prefix."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import pearsonr, spearmanr

from otb.laboratory.estimators import Prompt, require_scores

TOP = 0.01  # share of the tokens, for `top_share`


def proxy_table(prompts: list[Prompt]) -> pd.DataFrame:
    """Returns a row per own token: prompt, rollout, t, proxy w and exact norm, and the same two of its prefix."""
    parts = []
    for index, prompt in enumerate(prompts):
        own = prompt.own
        rollout, t = own.nonzero(as_tuple=True)
        columns = {
            "proxy": prompt.score_norms,
            "exact": require_scores(prompt.token_norms),
            "prefix_proxy": prompt.score_norms.cumsum(-1),
            "prefix_exact": require_scores(prompt.prefix_norms),
        }
        values = {name: tensor[own].double().numpy() for name, tensor in columns.items()}
        parts.append(pd.DataFrame({"prompt": index, "rollout": rollout.numpy(), "t": t.numpy(), **values}))
    return pd.concat(parts, ignore_index=True)


def proxy_quality(table: pd.DataFrame) -> pd.DataFrame:
    """Returns rank and linear correlations of proxy and exact norm over tokens, prefixes and rollouts.

    Row "prefix, same prompt and t" correlates prefixes that baselines compare, and averages over cells of at least 8
    rollouts; the other rows pool all tokens. top_share_proxy, top_share_exact: see `top_share`.
    """
    whole = table[table.groupby(["prompt", "rollout"]).t.transform("max") == table.t]
    cells = [cell for _, cell in table.groupby(["prompt", "t"]) if len(cell) >= 8]
    within = np.nanmean([correlations(cell.prefix_proxy, cell.prefix_exact) for cell in cells], axis=0)
    pairs = {
        "token": correlations(table.proxy, table.exact),
        "prefix": correlations(table.prefix_proxy, table.prefix_exact),
        "prefix, same prompt and t": within,
        "rollout": correlations(whole.prefix_proxy, whole.prefix_exact),
    }
    rows = [{"of": name, "spearman": rank, "pearson": linear} for name, (rank, linear) in pairs.items()]
    rows[0] |= {"top_share_proxy": top_share(table.proxy), "top_share_exact": top_share(table.exact)}
    return pd.DataFrame(rows)


def correlations(x, y) -> tuple[float, float]:
    """Returns Spearman's and Pearson's correlation; NaN if x or y is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan"), float("nan")
    return float(spearmanr(x, y).statistic), float(pearsonr(x, y).statistic)


def top_share(energy) -> float:
    """Returns the share of the total energy in the 1 % of tokens with the most energy."""
    largest = np.sort(energy)[::-1][: max(1, round(TOP * len(energy)))]
    return float(largest.sum() / np.sum(energy))
