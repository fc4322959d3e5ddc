"""Reads a plain TRL run from its trainer_state.json: curves, without arm, group size or tokens."""

from __future__ import annotations

import json
from pathlib import Path

from analysis.runs.rows import RunRecord, read_mapping, table_of

# TRL's name -> ours, where both mean the same. Its num_tokens counts prompts too, so tokens stay unmeasured.
TRL_NAMES = {
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "reward": "reward_mean",
    "entropy": "entropy",
    "kl": "kl",
    "frac_reward_zero_std": "equal_reward_groups",
    "completions/mean_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "completions/clipped_ratio": "truncated",
    "step_time": "seconds_step",
}


def trainer_state(path: Path) -> Path | None:
    """Returns the newest trainer_state.json of a plain TRL run: the folder's, else its last checkpoint's, or None."""
    if (path / "trainer_state.json").exists():
        return path / "trainer_state.json"
    states = [(int(file.parent.name.rsplit("-", 1)[-1]), file) for file in path.glob("checkpoint-*/trainer_state.json")]
    return max(states)[1] if states else None


def read_trl_run(file: Path, name: str) -> RunRecord:
    """Reads the log_history of a plain TRL run. Arm, group size and tokens are not in it: unmeasured, not guessed."""
    warnings: list[str] = []
    state = read_mapping(file, json.loads, warnings)
    rows: dict[int, dict] = {}
    evaluations = []
    for entry in state.get("log_history", []):
        step = entry.get("step", 0)
        metrics = {ours: entry[theirs] for theirs, ours in TRL_NAMES.items() if theirs in entry}
        if "eval_reward" in entry:
            evaluations.append({"step": step, "evaluation_reward_mean": entry["eval_reward"]})
        if "reward" in entry:
            rows.setdefault(step, {"step": step}).update(metrics)
    done = state.get("global_step", 0) >= state.get("max_steps", 1)
    facts = {
        "run": name,
        "kind": "trl",
        "outcome": "finished" if done else "unfinished",
        "last_step": int(state.get("global_step", 0)),
        "version": "TRL",
        "damaged_lines": 0,
    }
    return RunRecord(facts, table_of(list(rows.values())), table_of(evaluations), warnings)
