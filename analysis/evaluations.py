"""Statistics of evaluations: avg@k, pass@k, maj@k, endings and lengths, with intervals over problems.

`python experiments/evaluate.py` leaves one row per sample in samples.jsonl, a run in its evaluations/. `read_samples`
or `read_run_samples` reads them back, and `measures` makes a tidy table of them, which `python -m analysis.evaluations
FOLDER ...` prints as csv for standalone evaluations. Every measure is a mean over problems of something that each
problem has by itself, so that problems are what the bootstrap resamples.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.intervals import FEWEST, LEVEL, RESAMPLES, Interval, stretch, wilson
from otb.errors import RunError
from otb.records import RunDirectory, read_rows, sample_step

SAMPLES, RESULTS = "samples.jsonl", "results.json"
# Name -> definition. A problem of which no sample could be scored is left out of the measures of right answers.
MEASURES = {
    "avg_at_k": "share of right answers (reward 1) among a problem's scored samples",
    "avg_at_k_sampling_error": "standard error of avg_at_k from sampling alone, these problems taken as fixed",
    "pass_at_k": "probability that one of k samples, drawn from those there are, is right: 1 - C(n-c, k) / C(n, k)",
    "maj_at_k": "share of problems whose most frequent answer is right; ties count the share of right ones among them",
    "ended": "share of samples that the policy ended itself, with an end token",
    "truncated": "share of samples cut by the limit of tokens",
    "cut_by_turns": "share of samples that asked for Python in the last turn",
    "right_and_ended": "share of scored samples with a right answer and an end of their own",
    "right_not_ended": "share of scored samples with a right answer that were cut",
    "no_answer": "share of samples from which the grader extracted no answer",
    "unscored": "share of samples that could not be scored, as when the grader ran out of time",
    "own_tokens": "tokens that the policy sampled, per sample",
    "tool_tokens": "tokens of Python's replies, per sample",
}


def read_samples(folder: str | Path, k: int | None = None, responses: bool = False) -> pd.DataFrame:
    """Returns a row per sample of an evaluation, the first `k` of each problem; all where k is None.

    responses: whether to keep the texts, which are most of the file. Raises RunError where the folder holds no samples.
    """
    file = Path(folder) / SAMPLES
    kept = (row for row in read_rows(file) if k is None or row["sample"] < k)
    rows = [row if responses else {name: row[name] for name in row if name != "response"} for row in kept]
    if not rows:
        raise RunError(f"{file} holds no samples. Give the folder of an evaluation, or run experiments/evaluate.py.")
    frame = pd.DataFrame(rows)
    frame["reward"] = frame["reward"].astype(float)  # None, of a sample that could not be scored, becomes NaN
    return frame


def read_run_samples(run: str | Path) -> pd.DataFrame:
    """Returns a row per sample of all evaluations that a run made while it trained, with the columns step and task.

    `measures` takes those of one step and task. Raises RunError where the run kept none.
    """
    directory = RunDirectory(run)
    files = sorted(directory.evaluations.glob("step-*.parquet"))
    if not files:
        raise RunError(f"{directory.evaluations} holds no samples. Give a run directory whose run has been evaluated.")
    return pd.concat([pd.read_parquet(file).assign(step=sample_step(file)) for file in files], ignore_index=True)


def pass_curve(samples: NDArray, right: NDArray, k: int) -> NDArray:
    """Returns the unbiased estimates of pass@1 to pass@k of each problem, (problems, k).

    Of n samples with c right ones, C(n-c, j) / C(n, j) is the share of all sets of j samples without a right one (Chen
    et al. 2021, arXiv 2107.03374). NaN where j > n. samples, right: n and c of each problem, (problems,).
    """
    n, c = np.asarray(samples, float)[:, None], np.asarray(right, float)[:, None]
    taken = np.arange(k)[None]  # samples drawn before this one
    with np.errstate(divide="ignore", invalid="ignore"):
        misses = np.where(taken < n, np.clip(n - c - taken, 0, None) / (n - taken), np.nan)
    return 1 - np.cumprod(misses, axis=1)


def majority(votes: Sequence[str | None], right: Sequence[float]) -> float:
    """Returns whether the most frequent vote is right: 1, 0, or the share of right ones among equally frequent votes.

    votes: the answer of each sample, None for a sample without one, which then has no vote; 0 where none votes.
    right: 1 or 0, NaN for a sample that could not be scored. NaN where a leading vote could not be scored.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    leaders = [vote for vote, count in counts.items() if count == max(counts.values())]
    verdicts = [[r for vote, r in zip(votes, right, strict=True) if vote == leader] for leader in leaders]
    scored = [[r for r in verdict if not np.isnan(r)] for verdict in verdicts]
    return float(np.mean([np.mean(verdict) if verdict else np.nan for verdict in scored]))


def over_problems(values: NDArray, *, share: bool = True, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Returns the mean over problems with its bootstrap interval. values: one per problem; NaN is left out.

    share: whether values lie in [0, 1]. Where all of them are 0, or all 1, no resample differs, and Wilson's
    interval of the share of such problems stands instead. The `seeds` of the interval are the problems that counted.
    """
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    n, estimate = len(values), float(values.mean()) if len(values) else np.nan
    if n < FEWEST or not resamples:
        return Interval(estimate, np.nan, np.nan, n)
    if share and (values == values[0]).all() and values[0] in (0, 1):
        return Interval(estimate, *wilson(int(values[0]) * n, n), n)
    drawn = values[np.random.default_rng(seed).integers(0, n, (resamples, n))].mean(axis=1)
    low, high = stretch(estimate, np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), n)
    return Interval(estimate, max(low, 0.0), min(high, 1.0) if share else high, n)


def problem_table(samples: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per problem: samples, scored, right, and the measures that a problem has by itself."""
    frame = samples.assign(
        scored=samples.reward.notna(), right=(samples.reward == 1).where(samples.reward.notna()).astype(float)
    )
    frame = frame.assign(ended=frame.ending == "end", truncated=frame.ending == "length")
    frame["right_and_ended"] = frame.right * frame.ended
    frame["right_not_ended"] = frame.right * ~frame.ended
    frame["unscored"] = ~frame.scored
    means = ["right_and_ended", "right_not_ended", "ended", "truncated", "unscored", "own_tokens"]
    if "tool_tokens" in frame:
        frame["cut_by_turns"] = frame.ending == "turns"
        means += ["cut_by_turns", "tool_tokens"]
    if "vote" in frame:
        frame["no_answer"] = frame.vote.isna()
        means += ["no_answer"]
    groups = frame.groupby("problem")
    table = groups[means].mean()
    table["samples"], table["scored"] = groups.size(), groups.scored.sum()
    table["right"], table["avg_at_k"] = groups.right.sum(), groups.right.mean()
    if "vote" in frame:
        votes = frame.vote.astype(object).where(frame.vote.notna(), None)
        of_problem = groups.groups.values()  # the labels of its rows, in the order of the table
        table["maj_at_k"] = [majority(votes[rows].tolist(), frame.right[rows].tolist()) for rows in of_problem]
    return table


def measures(samples: pd.DataFrame, k: int) -> pd.DataFrame:
    """Returns the tidy table: a row per measure, and per number of samples for pass_at_k.

    samples: of `read_samples`, k of each problem. Columns: measure, k, estimate, low, high, problems (which counted).
    """
    table = problem_table(samples)
    found = [("avg_at_k", k, over_problems(table.avg_at_k.to_numpy()))]
    if k > 1:
        error = sampling_error(table.scored.to_numpy(), table.right.to_numpy())
        found.append(("avg_at_k_sampling_error", k, Interval(error, np.nan, np.nan, len(table))))
    curve = pass_curve(table.scored.to_numpy(), table.right.to_numpy(), k)
    found += [("pass_at_k", j + 1, over_problems(curve[:, j])) for j in range(k)]
    for name in [name for name in MEASURES if name in table and name != "avg_at_k"]:
        found.append((name, k, over_problems(table[name].to_numpy(), share=not name.endswith("tokens"))))
    rows = [(name, size, value.estimate, value.low, value.high, value.seeds) for name, size, value in found]
    return pd.DataFrame(rows, columns=["measure", "k", "estimate", "low", "high", "problems"])


def sampling_error(scored: NDArray, right: NDArray) -> float:
    """Returns the standard error of the mean over problems of right / scored, with the problems taken as fixed.

    The unbiased variance of a problem's share is p (1 - p) / (n - 1). NaN where a problem has fewer than two samples.
    """
    n = np.asarray(scored, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.asarray(right, float) / n
        return float(np.sqrt(np.sum(p * (1 - p) / (n - 1))) / len(n)) if (n > 1).all() else np.nan


def peak_and_final(right: dict[int, NDArray]) -> dict[str, float]:
    """Returns peak and final accuracy of a run's checkpoints, and the peak as it is without the luck of its samples.

    right: step -> (problems, k) of 1, 0 or NaN. `peak` is the largest of several noisy numbers and therefore too high;
    `peak_held_out` chooses the checkpoint by one half of the samples and measures it on the other, both ways, so that
    only the choice of checkpoints and problems flatters it. It is absent where k < 2.
    """
    steps = sorted(right)
    accuracy = {step: float(np.nanmean(np.nanmean(right[step], axis=1))) for step in steps}
    best = best_of(accuracy)
    found = {"peak": accuracy[best], "peak_step": best, "final": accuracy[steps[-1]], "final_step": steps[-1]}
    if all(values.shape[1] > 1 for values in right.values()):
        halves = [{step: float(np.nanmean(right[step][:, half::2])) for step in steps} for half in (0, 1)]
        chosen = [other[best_of(half)] for half, other in (halves, halves[::-1])]
        found["peak_held_out"] = sum(chosen) / 2
    return found | {"checkpoints": len(steps)}


def best_of(accuracy: dict[int, float]) -> int:
    """Returns the step of the highest accuracy, the earliest of equals."""
    return max(accuracy, key=lambda step: (accuracy[step], -step))


def right_answers(samples: pd.DataFrame) -> NDArray:
    """Returns (problems, k) of 1, 0, or NaN for a sample that could not be scored."""
    wide = samples.pivot(index="problem", columns="sample", values="reward").to_numpy(float)
    return np.where(np.isnan(wide), np.nan, (wide == 1).astype(float))


def read_results(root: str | Path) -> pd.DataFrame:
    """Returns the tidy tables of all evaluations below a folder, with the columns task, policy and step in front."""
    frames = []
    for file in sorted(Path(root).rglob(RESULTS)):
        results = json.loads(file.read_text(encoding="utf8"))
        frame = pd.DataFrame(results["measures"])
        for column in ("step", "policy", "task"):
            frame.insert(0, column, results[column])
        frames.append(frame.assign(folder=str(file.parent)))
    if not frames:
        raise RunError(f"No {RESULTS} below {root}. Give a folder of evaluations, or run experiments/evaluate.py.")
    return pd.concat(frames, ignore_index=True)


def main(folders: list[str]) -> None:
    """Prints the tidy tables of all evaluations below the folders as csv."""
    pd.concat([read_results(folder) for folder in folders]).to_csv(sys.stdout, index=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or ["evaluations"])
    except RunError as error:
        sys.exit(f"error: {error}")
