"""Reads rollouts with score norms, from experiments/forecast.py or from a run, and forecasts on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig

from analysis.runs.read_trl import trainer_state
from analysis.runs.samples import read_samples, sample_steps
from experiments.measuring import forecast_table
from otb.errors import RunError
from otb.files import write_atomically
from otb.laboratory.energies import energy_contrast, headroom, mixed
from otb.laboratory.forecast import ScoredRollouts, forecast
from otb.score_norms import logit_gradient_proxy

NEEDED = (
    "A forecast reads the columns prompt (a number), reward (a number) and energies (a list, sum of w up to each own "
    "token), a row per rollout; in the place of energies, log_probs and log_sum_sq_probs (lists, per own token, at the "
    "sampling temperature; log sum pi^2 = logsumexp(2 z) - 2 logsumexp(z))."
)


def rollouts_file(cfg: DictConfig, folder: Path, index: int) -> Path:
    """Returns the file of a prompt's rollouts."""
    return folder / "rollouts" / f"prompt-{index:04d}-{cfg.rollouts}.parquet"


def missing(cfg: DictConfig, folder: Path) -> list[int]:
    """Returns the numbers of the prompts that have no file yet."""
    return [index for index in range(cfg.prompts) if not rollouts_file(cfg, folder, index).exists()]


def forecast_of_folder(cfg: DictConfig, estimators: dict[str, Callable], folder: Path) -> None:
    """Prints the forecast on the rollouts that `folder` holds, and writes its table there."""
    files = [rollouts_file(cfg, folder, index) for index in range(cfg.prompts)]
    rows = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    prompts = scored_rollouts(rows, str(folder))
    check_spread(prompts, str(folder))
    table = forecast(prompts, estimators, list(cfg.group_sizes), cfg.partitions, cfg.seed)
    write_atomically(folder / "forecast.csv", table.to_csv(index=False))
    print(f"rollouts and forecast.csv: {folder}")
    forecast_table.report(table, headroom(prompts, cfg.seed), energy_contrast(prompts), facts_of(rows), cfg)


def forecast_of_run(cfg: DictConfig, estimators: dict[str, Callable], path: Path, steps: list[int] | None) -> None:
    """Prints the forecast on rollouts that a run has kept: of all steps together, then of each. Raises RunError."""
    by_step = read_kept(path, steps)
    by_prompts = {step: scored_rollouts(rows, str(path)) for step, rows in by_step.items()}
    prompts = [prompt for of_step in by_prompts.values() for prompt in of_step]
    check_spread(prompts, str(path))
    largest = max(len(prompt.rewards) for prompt in prompts)
    sizes = [size for size in cfg.group_sizes if size <= largest] or [largest]
    options = (cfg.partitions, cfg.seed)
    table = forecast(prompts, estimators, sizes, *options)
    one_by_one = {
        step: forecast(of_step, estimators, sizes[:1], *options, resamples=0)
        for step, of_step in by_prompts.items()
        if mixed(of_step)
    }
    rows = pd.concat(by_step.values(), ignore_index=True)
    if len(by_step) > 1:
        forecast_table.print_steps(one_by_one, sizes[0])
    forecast_table.report(table, headroom(prompts, cfg.seed), energy_contrast(prompts), facts_of(rows), cfg)


def read_kept(path: Path, steps: list[int] | None) -> dict[int, pd.DataFrame]:
    """Returns step -> rows of a run directory, or of a parquet file (step 0 without such a column). Raises RunError."""
    if path.is_file():
        try:
            rows = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise RunError(f"run={path} is no parquet file. {NEEDED}") from error
        kept = {int(step): part for step, part in rows.groupby("step")} if "step" in rows else {0: rows}
        if absent := sorted(set(steps or []) - set(kept)):
            raise RunError(f"steps={absent} are not in {path}; there: {', '.join(map(str, sorted(kept)))}.")
        return {step: kept[step] for step in sorted(kept) if steps is None or step in steps}
    if trainer_state(path) is not None and not (path / "config.yaml").exists():
        raise RunError(f"run={path} is a plain TRL run, which logs no score norms. {NEEDED} Give such a parquet file.")
    return {step: read_samples(path, step) for step in steps or sample_steps(path) or [None]}


def scored_rollouts(rows: pd.DataFrame, where: str) -> list[ScoredRollouts]:
    """Returns the scored rollouts of each prompt. Raises RunError where a column is missing or empty."""
    lacking = sorted({"prompt", "reward"} - set(rows))
    has_energies = "energies" in rows and rows.energies.notna().all()
    if lacking or not (has_energies or {"log_probs", "log_sum_sq_probs"} <= set(rows)):
        hint = "" if lacking else " A run keeps energies where its baseline uses score norms, or with log_energy=true."
        raise RunError(f"{where}: no {', '.join(lacking) or 'energies'}.{hint} {NEEDED}")
    prompts = []
    for _, group in rows[rows.reward.notna()].groupby("prompt", sort=True):
        norms = [score_norms(row, has_energies) for _, row in group.iterrows()]
        padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(w) for w in norms], batch_first=True)
        lengths = torch.tensor([len(w) for w in norms])
        prompts.append(ScoredRollouts(torch.tensor(group.reward.to_numpy(np.float32)), lengths, padded))
    return prompts


def score_norms(row: pd.Series, has_energies: bool) -> np.ndarray:
    """Returns w of each own token, (T,) float32. has_energies: w is the difference of energies, else from log pi."""
    if has_energies:
        return np.diff(np.asarray(row.energies, np.float64), prepend=0.0).clip(min=0).astype(np.float32)
    log_probs, log_sum_sq_probs = (torch.from_numpy(np.array(row[name])) for name in ("log_probs", "log_sum_sq_probs"))
    return logit_gradient_proxy(log_probs, log_sum_sq_probs).numpy().astype(np.float32)


def check_spread(prompts: list[ScoredRollouts], where: str) -> None:
    """Raises RunError where no prompt has rollouts of different rewards."""
    if not mixed(prompts):
        raise RunError(
            f"{where}: rewards differ in none of the {len(prompts)} prompts, so rloo has no gradient to compare with. "
            "Try more prompts, or a task that the policy solves sometimes."
        )


def facts_of(rows: pd.DataFrame) -> forecast_table.Facts:
    """Returns the facts of some rows of rollouts."""
    return forecast_table.Facts(
        rollouts=len(rows),
        unscored=int(rows.reward.isna().sum()),
        cut=float((rows.ending != "end").mean()) if "ending" in rows and rows.ending.notna().all() else None,
        with_tools="own" in rows and not all(np.all(own) for own in rows.own),
        mean_reward=float(rows.reward.mean()),
    )
