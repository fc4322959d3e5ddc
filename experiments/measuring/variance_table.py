"""Reports the laboratory's results: tables on screen and as csv, and the figures of analysis/laboratory.py."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Column, Table

from analysis.laboratory import draw_all
from otb.laboratory.estimators import Prompt
from otb.laboratory.proxy import proxy_quality, proxy_table
from otb.laboratory.statistics import estimator_statistics

RESULTS, MOMENTS_FILE, PROXY, TOKENS = "estimators.csv", "moments.csv", "proxy.csv", "tokens.parquet"


def report(rows: pd.DataFrame, prompts: list[Prompt], folder: Path) -> None:
    """Writes and prints the tables and draws the figures.

    rows: moments per prompt, estimator and group size; prompts: the prompts with exact scores.
    """
    results, tokens = estimator_statistics(rows), proxy_table(prompts)
    quality = proxy_quality(tokens)
    rows.to_csv(folder / MOMENTS_FILE, index=False)
    results.to_csv(folder / RESULTS, index=False)
    quality.to_csv(folder / PROXY, index=False)
    tokens.to_parquet(folder / TOKENS)
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for size in sorted(results.group_size.unique()):
        console.print(estimator_table(results[results.group_size == size], int(size)))
    console.print(quality_table(quality))
    files = draw_all(results, tokens, folder / "figures")
    console.print(f"figures: {', '.join(str(file) for file in files if file.suffix == '.png')}", soft_wrap=True)


def estimator_table(results: pd.DataFrame, size: int) -> Table:
    """Returns a table of the estimators at one group size, sorted by noise; intervals are over prompts."""
    prompts = int(results.prompts.iloc[0])
    title = f"N = {size}: noise-to-signal relative to rloo, {prompts} prompts, 95 % intervals over prompts"
    table = Table(Column("estimator", no_wrap=True), title=title)
    has_oracle = "energy_ratio" in results and results.energy_ratio.notna().any()
    columns = ("noise / rloo", "/ energy_probe", "noise", "bias", "1 - cos^2", "scale", "cosine")
    for column in (*columns, *(["energy / oracle"] if has_oracle else [])):
        table.add_column(column)
    for row in results.sort_values("relative_noise").itertuples():
        cells = [f"{row.relative_noise:.2f} {interval(row.relative_noise_low, row.relative_noise_high)}"]
        cells += [f"{row.over_probe:.2f} {interval(row.over_probe_low, row.over_probe_high)}"]
        cells += [f"{row.noise:.2f}", f"{row.bias:.3f}", f"{row.direction_bias:.3f}", f"{row.scale:.2f}"]
        cells += [f"{row.cosine:.2f}", *([f"{row.energy_ratio:.2f}"] if has_oracle else [])]
        table.add_row(row.estimator, *cells)
    return table


def interval(low: float, high: float) -> str:
    """Returns "[low, high]"; "unknown" for NaN, because rich would interpret "[nan, nan]" as a style."""
    return "unknown" if math.isnan(low) else f"[{low:.2f}, {high:.2f}]"


def quality_table(quality: pd.DataFrame) -> Table:
    """Returns a table of how well the proxy agrees with exact norms, for tokens, prefixes and rollouts."""
    table = Table("proxy against exact norm of", "Spearman", "Pearson", "top 1 % share", title="the proxy")
    for row in quality.itertuples():
        shares = f"proxy {row.top_share_proxy:.2f}, exact {row.top_share_exact:.2f}"
        table.add_row(row.of, f"{row.spearman:.3f}", f"{row.pearson:.3f}", shares if row.of == "token" else "")
    return table
