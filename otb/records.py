"""The run directory and the names of what is measured. Imports no torch: analysis, SLURM and the command line read it.

config.yaml         the resolved configuration          environment.json   versions, commit, host, data
metrics.jsonl       a row per step, append-only         evaluations.jsonl  a row per evaluation
status.json         state and progress                  rollouts/          samples, a parquet file per kept step
checkpoints/        step-00000040/, complete or absent  discarded.jsonl    rows that a resumed run wrote again
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    definition: str


# Names are written here once; what is not measured is absent from a row, never 0.
METRICS = {
    "step": Metric("1", "optimizer steps done; one step consumes one batch of rollouts"),
    "own_tokens": Metric("tokens", "tokens the policy sampled in this step"),
    "tool_tokens": Metric("tokens", "tokens that tools put into the responses of this step"),
    "own_tokens_total": Metric("tokens", "own tokens since the start of the run; evaluations are not counted"),
    "tool_tokens_total": Metric("tokens", "tool tokens since the start of the run"),
    "reward_mean": Metric("reward", "mean over the scored rollouts of the step"),
    "reward_spread": Metric("reward", "standard deviation over the scored rollouts of the step"),
    "accuracy": Metric("share", "scored rollouts with reward 1"),
    "unscored": Metric("share", "rollouts that no reward function could score; absent when there were none"),
    "response_length_mean": Metric("tokens", "own tokens per rollout, mean"),
    "response_length_max": Metric("tokens", "own tokens per rollout, largest"),
    "equal_reward_groups": Metric("share", "prompt groups whose scored rollouts all have one reward"),
    "truncated": Metric("share", "rollouts that reached a length limit without an end token"),
    "gradient_norm": Metric("norm", "Euclidean norm of the whole gradient before clipping"),
    "loss": Metric("1", "policy loss of the step, summed over its micro-batches"),
    "entropy": Metric("nats", "mean entropy of the policy over own tokens, at the sampling temperature"),
    "kl": Metric("nats", "mean k3 estimate of KL(policy, reference) over own tokens; only with beta > 0"),
    "learning_rate": Metric("1", "learning rate of the step"),
    "advantage_mean": Metric("reward", "mean over own tokens of the advantages used"),
    "advantage_spread": Metric("reward", "standard deviation over own tokens of the advantages used"),
    "advantage_max": Metric("reward", "largest absolute advantage used"),
    "baseline_mean": Metric("reward", "mean of the baseline over own tokens"),
    "baseline_spread": Metric("reward", "standard deviation of the baseline over own tokens"),
    "energy_mean": Metric("norm^2", "realized energy W_T = sum_t w_t per rollout, mean; w is the logit-gradient proxy"),
    "energy_spread": Metric("norm^2", "realized energy per rollout, standard deviation"),
    "total_power": Metric("reward^2 norm^2", "sum_t w_t A_t^2 per rollout, mean: token-diagonal power of the gradient"),
    "seconds_sampling": Metric("s", "time spent generating the rollouts of the step, tools included"),
    "seconds_scoring": Metric("s", "time spent in reward functions"),
    "seconds_advantages": Metric("s", "time spent on score norms, baseline and advantages, their own forward included"),
    "seconds_loss": Metric("s", "rest of the step: loss forward, backward, optimizer"),
    "seconds_step": Metric("s", "wall time of the step, without evaluations and checkpoints"),
    "peak_memory_bytes": Metric("bytes", "largest device memory allocated so far; resident memory on a CPU"),
    "turns_mean": Metric("turns", "assistant turns per rollout, mean"),
    "tool_calls": Metric("calls", "tool calls of the step"),
    "tool_failed": Metric("share", "tool calls whose code raised an error"),
    "tool_timed_out": Metric("share", "tool calls that ran into a limit of time or memory"),
    "tool_refused": Metric("share", "tool calls not run: malformed, over a limit, or past the last turn"),
    "tool_seconds": Metric("s", "time the tools ran, summed over the calls of the step"),
    "cut_by_turns": Metric("share", "rollouts ended by the turn limit"),
    "cut_by_length": Metric("share", "rollouts ended by the length limit"),
    "never_called": Metric("share", "rollouts without a tool call"),
}
EVALUATION_METRICS = {
    "step": Metric("1", "optimizer steps done before this evaluation"),
    "accuracy": Metric("share", "avg@k: held-out samples with reward 1, k samples per prompt"),
    "pass_at_k": Metric("share", "held-out prompts with at least one sample of reward 1"),
    "samples": Metric("1", "k, samples per prompt"),
    "prompts": Metric("1", "held-out prompts"),
    "response_length_mean": Metric("tokens", "own tokens per sample, mean"),
    "unscored": Metric("share", "samples that could not be scored; absent when there were none"),
    "own_tokens_total": Metric("tokens", "own tokens of training before this evaluation"),
    "seconds": Metric("s", "wall time of the evaluation"),
}
# What differs between two runs of one configuration; everything else is equal, bit for bit, on one CPU.
TIME_AND_MEMORY = frozenset(
    name for name in METRICS if name.startswith("seconds_") or name in ("peak_memory_bytes", "tool_seconds")
) | {"seconds"}


class RunError(Exception):
    """A problem the user can mend; its text says the value, the rule and the fix. Shown without a traceback."""


def metric_table() -> str:
    """The metric names as a Markdown table; docs/metrics.md is this text."""
    lines = []
    for title, metrics in (("metrics.jsonl", METRICS), ("evaluations.jsonl", EVALUATION_METRICS)):
        lines += [f"## {title}", "", "| name | unit | definition |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.definition} |" for name, metric in metrics.items()]
        lines.append("")
    return "\n".join(lines)


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new one, whatever happens in between."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error.strerror}. Free space or choose another runs_dir.") from error


def sync_tree(directory: Path) -> None:
    """fsync of every file below a directory and of the directories themselves."""
    for folder, _, names in os.walk(directory):
        for path in [*(os.path.join(folder, name) for name in names), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_rows(path: Path) -> Iterator[dict]:
    """Rows of a jsonl file; a last line that a crash cut short is left out. Empty where there is no file."""
    if not path.exists():
        return
    with open(path, encoding="utf8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    raise RunError(f"{path} holds a damaged line that is not its last: {line[:80]!r}.") from None


class RunDirectory:
    """One run: its files, its progress, its checkpoints. A single process writes (`RunLock`); anybody may read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.discarded_file = self.path / "discarded.jsonl"
        self.status_file = self.path / "status.json"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"

    # ---- status

    def status(self) -> dict:
        """The last status written: state (running, finished, failed), step, steps, updated, error; {} for a new run."""
        try:
            return json.loads(self.status_file.read_text(encoding="utf8"))
        except FileNotFoundError:
            return {}

    def write_status(self, state: str, **facts) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomically(self.status_file, json.dumps({"state": state, "updated": now, **facts}, indent=1) + "\n")

    # ---- rows

    def append(self, file: Path, row: dict) -> None:
        """One line, handed to the operating system before the call returns; NaN is refused by the reader's side."""
        try:
            with open(file, "a", encoding="utf8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"{file} cannot be written: {error.strerror}. Free space, then run again.") from error

    def last_metrics(self) -> dict:
        row = {}
        for row in read_rows(self.metrics_file):  # noqa: B007 - the last row is wanted
            pass
        return row

    def discard_after(self, step: int) -> int:
        """Moves metric and evaluation rows of steps after `step` to discarded.jsonl; -> how many were moved."""
        moved = 0
        for file in (self.metrics_file, self.evaluations_file):
            rows = list(read_rows(file))
            kept = [row for row in rows if row["step"] <= step]
            for row in rows[len(kept) :]:
                self.append(self.discarded_file, {"file": file.name, **row})
            if file.exists():
                write_atomically(file, "".join(json.dumps(row) + "\n" for row in kept))
            moved += len(rows) - len(kept)
        for sample in self.rollouts.glob("step-*.parquet"):
            if int(sample.stem.removeprefix("step-")) > step:
                sample.unlink()
        return moved

    # ---- checkpoints

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending: a folder under its final name is complete."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*"))

    def publish_checkpoint(self, written: Path, step: int) -> Path:
        """Makes a fully written folder a checkpoint: fsync, then rename; nothing incomplete bears its name."""
        sync_tree(written)
        final = self.checkpoint(step)
        if final.exists():  # the same step again, after a resume that discarded its rows
            shutil.rmtree(final)
        os.rename(written, final)
        sync_directory(self.checkpoints)
        return final

    def best_checkpoint_step(self) -> int | None:
        """Among the checkpoints, the one with the highest evaluated accuracy; the earliest of equals."""
        complete = set(self.checkpoint_steps())
        scores = {row["step"]: row["accuracy"] for row in read_rows(self.evaluations_file) if row["step"] in complete}
        return max(scores, key=lambda step: (scores[step], -step), default=None)

    def prune_checkpoints(self, resume_files: tuple[str, ...]) -> None:
        """Keeps the last and the best; of the best only what evaluation needs, without `resume_files` (patterns)."""
        steps = self.checkpoint_steps()
        best = self.best_checkpoint_step()
        for step in steps[:-1]:
            if step != best:
                aside = self.checkpoints / f".old-{step:08d}"
                os.rename(self.checkpoint(step), aside)  # at once incomplete by name, whatever happens next
                shutil.rmtree(aside)
                continue
            for pattern in resume_files:
                for file in self.checkpoint(step).glob(pattern):
                    file.unlink()

    def clear_unfinished(self) -> None:
        """Removes what a killed process left half-written."""
        for pattern in (".writing*", ".old-*"):
            for path in self.checkpoints.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob(".*.json.*"):
            path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def timestamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")
