"""Rows of the study that are made up, for tests of what reads them."""

import numpy as np
import pandas as pd

from analysis.claims.runs import Runs
from study import collected, verdicts
from tests.support.commands import ROOT

RUNS = ROOT / "tests" / "data" / "runs"
STEPS = np.array([0, 10, 20])
SEEDS = range(10)


def a_run():
    return next(iter(sorted(path.parent for path in RUNS.rglob("metrics.jsonl"))))


def made_up(baseline="otb", group_size=4, seed=0, final=0.8, task="arithmetic", rate=1e-3, tokens=1000.0) -> dict:
    """A row whose accuracy goes straight from .4 to `final`, evaluated at three steps."""
    accuracy = 0.4 + (final - 0.4) * STEPS / STEPS[-1]
    cells = {
        "evaluation_step": STEPS,
        "evaluation_accuracy": accuracy,
        "evaluation_own_tokens_total": tokens * STEPS,
        "evaluation_response_length_mean": [20] * 3,
        "own_tokens_total": tokens * np.arange(1, STEPS[-1] + 1),
        **{name: [1] * STEPS[-1] for name in ("accuracy", "gradient_norm", "response_length_mean", "truncated")},
    }
    facts = {"key": f"{task}-{baseline}-{group_size}-{seed}-{rate}", "task": task, "baseline": baseline}
    facts |= {"group_size": group_size, "prompts_per_step": 16, "learning_rate": rate, "seed": seed, "steps": 20}
    facts |= {"outcome": "finished", "libraries": "", "commit": "", "device": "cpu"}
    return facts | {name: collected.joined(pd.Series(values)) for name, values in cells.items()}


def rows_of(**finals: float) -> list[dict]:
    """Returns ten rows of each arm, named like otb_4, whose final accuracies have a spread of .002."""
    made = []
    for name, final in finals.items():
        baseline, _, size = name.rpartition("_")
        made += [made_up(baseline, int(size), seed, final + 0.001 * (seed % 3 - 1)) for seed in SEEDS]
    return made


def arms(**finals: float) -> Runs:
    return verdicts.runs_of(pd.DataFrame(rows_of(**finals)))


def spoken(comparisons) -> str:
    (verdict,) = [comparison.verdict for comparison in comparisons if comparison.verdict]
    return verdict
