"""Writes run directories with rollouts whose numbers are known by hand, for the tests of the rollout browser."""

import math
from pathlib import Path

import pandas as pd

from otb.records import RunDirectory
from tests.support.analysis_runs import write_run

HOSTILE = '</script><img src=x onerror="document.title=1">'  # text that looks like HTML, as a prompt and as a token
PROMPTS = ("<|im_start|>user\nwhat is 7 + 8 ?<|im_end|>\n", f"{HOSTILE}<!-- & ?", "how many apples ?")
ANSWER = ["7", " +", " 8", " =", " 15", HOSTILE, "\x1b[2J", "\n", "\u202ex", "."]
CALL = ["so ", "<tool_call>", "print(7+8)", "</tool_call>", "<|im_end|>", "\n", "15", "\n", "it is ", "15"]
IS_TOOL = [False] * 5 + [True] * 3 + [False] * 2
LONG = ["word "] * 60

# In a browser: the group is there, and every rollout that can be seen has its tokens.
SETTLED = """const seen = box => box.top < innerHeight && box.bottom > 0;
const done = rollout => rollout.spans || !seen(rollout.article.getBoundingClientRect());
return document.querySelector("article") && views.every(view => view.rollouts.every(done))"""


def rollout(tokens: list[str], reward: float, ending: str, scale: float, is_tool: list[bool] | None = None) -> dict:
    """Returns a rollout; own token t from 0 has w = 0.5, pi = 0.5, B = scale / (t + 2), A = R - B, 0 if unscored."""
    own = [not tool for tool in is_tool or [False] * len(tokens)]
    baselines = [scale / (t + 2) for t in range(sum(own))]
    return {
        "tokens": tokens,
        "own": own,
        "reward": reward,
        "ending": ending,
        "baselines": baselines,
        "advantages": [0.0 if math.isnan(reward) else reward - value for value in baselines],
        "energies": [0.5 * (t + 1) for t in range(sum(own))],
        "log_probs": [math.log(0.5)] * sum(own),
    }


def write_rollouts(run: Path, step: int, scale: float, name: str = "step") -> None:
    """Writes three groups of three rollouts: one right, one wrong with a tool call, one unscored and truncated."""
    rows = []
    for prompt, text in enumerate(PROMPTS):
        group = [
            rollout(ANSWER, 1.0, "end", scale),
            rollout(CALL, 0.0, "end", scale, IS_TOOL),
            rollout(LONG, float("nan"), "length", scale),
        ]
        shared = {"step": step, "prompt": prompt, "prompt_text": text}
        rows += [shared | {"rollout": i, "response_text": "".join(row["tokens"])} | row for i, row in enumerate(group)]
    pd.DataFrame(rows).to_parquet(RunDirectory(run).rollouts / f"{name}-{step:08d}.parquet")


def write_rollout_runs(folder: Path) -> Path:
    """Writes otb and grpo with steps 20 and 40 of the same prompts; rloo has one group of step 40 in an older file."""
    for baseline, scale in (("otb", 1.0), ("grpo", 0.5)):
        run = write_run(folder, baseline)
        write_rollouts(run, 20, scale)
        write_rollouts(run, 40, scale)
    older = RunDirectory(write_run(folder, "rloo")).rollouts / "step-00000040.parquet"
    pd.read_parquet(older).drop(columns="baselines").to_parquet(older)
    return folder
