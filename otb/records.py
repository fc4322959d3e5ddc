"""The run directory and the names of all metrics. It imports no torch: analysis, SLURM and the command line read it.

config.yaml         the resolved configuration          environment.json   versions, commit, host, data
metrics.jsonl       a row per step, append-only         evaluations.jsonl  a row per evaluation
status.json         state and progress                  rollouts/          samples, a parquet file per kept step
checkpoints/        step-00000040/, complete or absent  discarded.jsonl    rows that a resumed run wrote again
evaluations/        a row per evaluated sample, parquet  lock.json         the process that writes
run_id              the name of this run at a tracker

`python -m otb.records` prints docs/metrics.md, the table of the names below.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from otb.errors import RunError, unwritable
from otb.files import sync_file, sync_tree, whole


class Metric(NamedTuple):
    """What one metric measures, and in which unit."""

    unit: str
    definition: str


# Names are written here once; what is not measured is absent from a row, never 0.
METRICS = {
    "step": Metric("1", "optimizer steps done; one step consumes one batch of rollouts"),
    "own_tokens": Metric("tokens", "tokens the policy sampled in this step, those of masked rollouts too"),
    "tool_tokens": Metric("tokens", "tokens that tools put into the responses of this step"),
    "own_tokens_total": Metric("tokens", "own tokens since the start of the run; evaluations are not counted"),
    "tool_tokens_total": Metric("tokens", "tool tokens since the start of the run"),
    "reward_mean": Metric("reward", "mean over the scored rollouts of the step"),
    "reward_spread": Metric("reward", "standard deviation over the scored rollouts of the step"),
    "accuracy": Metric("share", "scored rollouts with reward 1"),
    "unscored": Metric("share", "rollouts that no reward function could score; absent when there were none"),
    "grade_correct": Metric("share", "rollouts whose final answer equals the reference; maths tasks only"),
    "grade_wrong": Metric("share", "rollouts with a readable answer that differs from the reference; maths tasks only"),
    "grade_unparsable": Metric(
        "share", "rollouts without a final answer, or with one that is no expression; maths tasks only"
    ),
    "grade_timeout": Metric("share", "rollouts whose grader ran out of time; unscored; maths tasks only"),
    "grade_error": Metric("share", "rollouts whose grader failed otherwise; unscored; maths tasks only"),
    "response_length_mean": Metric("tokens", "own tokens per rollout, mean"),
    "response_length_max": Metric("tokens", "own tokens per rollout, largest"),
    "equal_reward_groups": Metric("share", "prompt groups whose scored rollouts all have one reward"),
    "dropped_by_mismatch": Metric(
        "share", "rollouts whose geometric mean ratio left geometric_ratio_band; they train nothing"
    ),
    "mismatch_mean": Metric(
        "nats",
        "absolute difference of log pi and the sampler's, per own token, mean; where vLLM or a copy of the policy "
        "samples",
    ),
    "mismatch_max": Metric(
        "nats",
        "absolute difference of log pi and the sampler's, per own token, largest; where vLLM or a copy of the policy "
        "samples",
    ),
    "importance_ratio_min": Metric(
        "1",
        "trained / sampled probability of an own token, clipped, smallest; where vLLM or a copy of the policy samples",
    ),
    "importance_ratio_mean": Metric(
        "1", "trained / sampled probability of an own token, clipped, mean; where vLLM or a copy of the policy samples"
    ),
    "importance_ratio_max": Metric(
        "1",
        "trained / sampled probability of an own token, clipped, largest; where vLLM or a copy of the policy samples",
    ),
    "log_ppl_abs_diff_mean": Metric(
        "nats",
        "absolute value of a rollout's mean of log pi minus the sampler's over its own tokens, mean over rollouts; "
        "where vLLM or a copy of the policy samples",
    ),
    "log_ppl_abs_diff_max": Metric(
        "nats",
        "absolute value of a rollout's mean of log pi minus the sampler's over its own tokens, largest; where vLLM or "
        "a copy of the policy samples",
    ),
    "mismatch_kl": Metric(
        "nats",
        "KL(sampler, policy) per own token, estimated by the mean of the sampler's log pi minus the policy's; where "
        "vLLM or a copy of the policy samples",
    ),
    "mismatch_k3": Metric(
        "nats",
        "KL(sampler, policy) per own token, k3 estimate: mean of ratio - 1 - log ratio, ratio = trained / sampled "
        "probability, not clipped; where vLLM or a copy of the policy samples",
    ),
    "mismatch_chi2_token": Metric(
        "1",
        "chi^2 of trained and sampled probability per own token: mean of ratio^2, minus 1; where vLLM or a copy of the "
        "policy samples",
    ),
    "mismatch_chi2_seq": Metric(
        "1",
        "chi^2 of trained and sampled probability of whole rollouts: mean over rollouts of the squared product of "
        "their tokens' ratios, minus 1; where vLLM or a copy of the policy samples",
    ),
    "truncated": Metric("share", "rollouts that the length limit ended"),
    "gradient_norm": Metric("norm", "Euclidean norm of the whole gradient before clipping"),
    "loss": Metric("1", "policy loss of the step, summed over its micro-batches"),
    "entropy": Metric(
        "nats", "entropy of the policy at the sampling temperature over own tokens; mean of micro-batches"
    ),
    "kl": Metric(
        "nats", "k3 estimate of KL(policy, reference) over own tokens; mean of micro-batches; with trainer.beta > 0"
    ),
    "learning_rate": Metric("1", "learning rate of the step"),
    "length_baseline": Metric(
        "tokens",
        "mean response length of the first steps, from which a surge is measured; with schedule=length_triggered",
    ),
    "length_surge_step": Metric(
        "1",
        "optimizer steps done when the mean response length surged; with schedule=length_triggered, absent before that",
    ),
    "improvement_mu": Metric("reward", "mean reward of the step, as it enters the window; with improvement="),
    "improvement_mu_his": Metric(
        "reward", "mean of the window, the mean rewards of the steps before; with improvement=, once the window is full"
    ),
    "improvement_xi": Metric(
        "1",
        "(mu - mu_his) / sigma_his: by how many standard deviations of the window the step's mean reward differs from "
        "the window's mean; with improvement=, once the window is full",
    ),
    "improvement_phi": Metric(
        "1",
        "factor of the advantages of the batch before in the improvement update; with improvement=, once the window is "
        "full",
    ),
    "improvement_ratio_mean": Metric(
        "1",
        "ratio to the policy that sampled the batch before, mean over its own tokens; absent without an improvement "
        "update",
    ),
    "improvement_clip_fraction": Metric(
        "share", "own tokens of the batch before whose ratio was clipped; absent without an improvement update"
    ),
    "improvement_gradient_norm": Metric(
        "norm", "Euclidean norm of the gradient of the improvement update; absent without one"
    ),
    "advantage_mean": Metric("reward", "mean over own tokens of the advantages used"),
    "advantage_spread": Metric("reward", "standard deviation over own tokens of the advantages used"),
    "advantage_max": Metric("reward", "largest absolute advantage used"),
    "baseline_mean": Metric("reward", "mean of the baseline over own tokens"),
    "baseline_spread": Metric("reward", "standard deviation of the baseline over own tokens"),
    "token_weight_gini": Metric(
        "1",
        "Gini coefficient of a rollout's token weights, mean over rollouts; 0 = equal; with token_weights=",
    ),
    "token_weight_support": Metric(
        "share",
        "effective support 1 / (T sum_t w_t^2) of a rollout's token weights w_t, which sum to 1 over its T own tokens; "
        "mean over rollouts; 1 = equal; with token_weights=",
    ),
    "token_weight_mean": Metric(
        "1", "factor of the advantages, mean over own tokens; not 1 with normalise=running; with token_weights="
    ),
    "token_signal_mean": Metric(
        "of the signal",
        "signal that the token weights are made of, mean over own tokens; with arca the norm of the residual; absent "
        "with uniform weights",
    ),
    "token_signal_max": Metric(
        "of the signal",
        "signal that the token weights are made of, largest; with arca the norm of the residual; absent with uniform "
        "weights",
    ),
    "mtp_cross_entropy": Metric(
        "nats", "-log pi of the auxiliary head per own token, at the sampling temperature; with auxiliary=mtp"
    ),
    "mtp_lambda": Metric(
        "1",
        "weight of the head's policy loss, mean over the forwards of the step; 0 in the first update of a batch; with "
        "auxiliary.mode=occ and occ_as_code",
    ),
    "mtp_c": Metric(
        "nats^2",
        "sum over the own tokens of a forward of d d_head, the changes of log pi of the policy and of its head since "
        "the tokens were sampled; with auxiliary.mode=occ, absent in the first update of a batch",
    ),
    "mtp_v2": Metric(
        "nats^2",
        "sum over the own tokens of a forward of d_head^2, d_head the change of the head's log pi since the tokens "
        "were sampled; with auxiliary.mode=occ, absent in the first update of a batch",
    ),
    "mtp_cosine": Metric(
        "1",
        "cosine of d and d_head, the changes of log pi of the policy and of its head since the tokens were sampled; "
        "with auxiliary.mode=occ, absent in the first update of a batch",
    ),
    "energy_mean": Metric(
        "norm^2",
        "realized energy W_T = sum_t w_t per scored rollout, mean; w: the proxy, times the squared factor of the token "
        "with token_weights=",
    ),
    "energy_spread": Metric("norm^2", "realized energy per scored rollout, standard deviation"),
    "total_power": Metric(
        "reward^2 norm^2", "sum_t w_t A_t^2 per scored rollout, mean: token-diagonal power; A before token_weights="
    ),
    "verl_power": Metric(
        "reward^2 norm^2",
        "verl's form of total_power: W_T (mean_t A_t)^2 per scored rollout, mean; equal to it for one A per rollout",
    ),
    "gradient_noise": Metric(
        "norm^2",
        "measured with measure_gradient_noise=true: trace of the covariance of one prompt group's gradient, unbiased; "
        "by two batch sizes (arXiv 1812.06162). Gradients are the loss's: with dr_grpo a group's is sum_t A_t grad log "
        "pi_t / (group_size x max_completion_length), and the step's is the mean of its groups'",
    ),
    "gradient_signal": Metric(
        "norm^2",
        "measured with measure_gradient_noise=true, as gradient_noise is: squared norm of the true gradient, unbiased, "
        "so that it may be negative",
    ),
    "verl_noise": Metric(
        "mixed", "verl's form of gradient noise: (verl_power - gradient_norm^2) / (rollouts of the step - 1)"
    ),
    "seconds_sampling": Metric("s", "time spent generating the rollouts of the step, tools included"),
    "seconds_scoring": Metric("s", "time spent in reward functions"),
    "seconds_advantages": Metric(
        "s", "time spent on score norms, baseline and advantages, with their own forward unless the loss takes it"
    ),
    "seconds_improvement": Metric("s", "time spent on the improvement update, if there is one"),
    "seconds_loss": Metric(
        "s", "rest of the step: loss forward (with the one that score norms share), backward, optimizer"
    ),
    "seconds_step": Metric("s", "wall time of the step, without evaluations and checkpoints"),
    "peak_memory_bytes": Metric(
        "bytes",
        "largest device memory allocated so far; on a CPU resident memory, with less of the libraries in a sweep",
    ),
    "turns_mean": Metric("turns", "assistant turns per rollout, mean"),
    "tool_calls": Metric("calls", "tool calls of the step"),
    "tool_failed": Metric("share", "tool calls whose code raised an error"),
    "tool_timed_out": Metric("share", "tool calls that ran into a limit of time, memory or output"),
    "tool_refused": Metric("share", "tool calls not run: malformed, over a limit, or past the last turn"),
    "tool_seconds": Metric("s", "time that programs ran, summed over the calls; one that calls share counts for each"),
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
# Configuration keys that say only where and how a run is made, not what is computed; `steps` because more of them
# continue a run. They name no other run directory (experiments/) and make no other setting (analysis/).
WHERE_AND_HOW = (
    "runs_dir",
    "overwrite",
    "steps",
    "checkpoint_every",
    "rollouts",
    "max_prompt_length",
    "sandbox.workers",
    "gpus",
    "card",
    "threads",
    "parallel",
    "rollouts_by.rows",
    "rollouts_by.tensor_parallel",
    "rollouts_by.memory_share",
    "rollouts_by.sleep",
    "rollouts_by.url",
    "rollouts_by.timeout_s",
    "trainer.report_to",
    "trainer.run_name",
    "trainer.use_cpu",
)
# Keys that run directories of earlier versions lack, with what those runs did. Neither their absence nor this value
# makes another run or another setting.
ADDED_LATER = {
    "auxiliary._target_": None,
    "evaluation.data_dir": None,
    "evaluation.max_rows": None,
    "evaluation.tasks": None,
    "geometric_ratio_band": None,
    "improvement._target_": None,
    "lean_steps": True,  # which draws other random numbers than runs from before it, of the same distribution
    "model.attn_implementation": None,
    "model.chat_template": None,
    "model.gguf_file": None,
    "rollouts_by.name": "hf",
    "schedule._target_": None,
    "task.instruction": None,
    "token_weights._target_": None,
    "task.files": "simplelr_qwen_level3to5/train.parquet",  # of math_lvl3to5, which was read from a local folder alone
    "trainer.vllm_importance_sampling_clip_max": 2.0,  # read by vLLM alone, which those runs did not use
    "trainer.vllm_importance_sampling_mode": "token_truncate",
}
# What differs between two runs of one configuration; everything else is equal, bit for bit, on one CPU.
TIME_AND_MEMORY = frozenset(
    name for name in METRICS if name.startswith("seconds_") or name in ("peak_memory_bytes", "tool_seconds")
) | {"seconds"}


def is_one_of(key: str, names: tuple[str, ...]) -> bool:
    """Tells whether a dotted configuration key is one of `names`, or lies below one of them."""
    return any(key == name or key.startswith(name + ".") for name in names)


def is_as_before(key: str, value: object) -> bool:
    """Tells whether a key of ADDED_LATER has the value with which runs from before it were made."""
    return key in ADDED_LATER and value == ADDED_LATER[key]


def flatten(config: dict, prefix: str = "") -> dict:
    """Returns a configuration with dotted keys, {"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays a value."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def metric_table() -> str:
    """Returns the metric names as a Markdown table; docs/metrics.md is this text."""
    lines = ["# Metrics", "", "Generated by `python -m otb.records`. What is not measured is absent from a row.", ""]
    for title, metrics in (("metrics.jsonl", METRICS), ("evaluations.jsonl", EVALUATION_METRICS)):
        lines += [f"## {title}", "", "| name | unit | definition |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.definition} |" for name, metric in metrics.items()]
        lines.append("")
    return "\n".join(lines[:-1])


def write_atomically(path: Path, text: str) -> None:
    """Replaces the text of a file, which holds the old text or the new one whatever happens. Raises RunError."""
    try:
        with whole(path) as aside:
            aside.write_text(text, encoding="utf8")
    except OSError as error:
        raise unwritable(path, error) from error


def read_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a jsonl file but a last line that a crash cut short; none where there is no file."""
    if not path.exists():
        return
    with open(path, encoding="utf8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    raise RunError(
                        f"{path} holds a damaged line: {line[:80]!r}. Every line but the last must be a JSON object. "
                        "Restore the file, or start anew with overwrite=true."
                    ) from None


class RunDirectory:
    """One run: its files, its progress, its checkpoints. A single process writes (`RunLock`), any may read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.discarded_file = self.path / "discarded.jsonl"
        self.status_file = self.path / "status.json"
        self.run_id_file = self.path / "run_id"
        self.rollouts = self.path / "rollouts"
        self.evaluations = self.path / "evaluations"
        self.checkpoints = self.path / "checkpoints"

    # ---- status

    def status(self) -> dict:
        """Returns the last status: state (running, finished, failed), step, steps, updated, error; {} for a new run."""
        try:
            return json.loads(self.status_file.read_text(encoding="utf8"))
        except FileNotFoundError:
            return {}

    def write_status(self, state: str, **facts) -> None:
        """Replaces the status. Raises RunError where it cannot be written."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_atomically(self.status_file, json.dumps({"state": state, "updated": now, **facts}, indent=1) + "\n")

    def run_id(self) -> str:
        """Returns eight characters that name this run at a tracker: kept by a resume, new after overwrite=true."""
        if not self.run_id_file.exists():
            write_atomically(self.run_id_file, secrets.token_hex(4))
        return self.run_id_file.read_text(encoding="utf8").strip()

    def evaluation_samples(self, step: int) -> Path:
        """Returns the file that holds the samples of an evaluation, whether there is one or not."""
        return self.evaluations / f"step-{step:08d}.parquet"

    # ---- rows

    def append(self, file: Path, row: dict) -> None:
        """Appends one line, which the operating system has whole before the call returns, or not at all.

        Raises RunError where it cannot be written, ValueError for NaN or infinity, which JSON does not have.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                end = os.fstat(descriptor).st_size
                try:
                    while line:
                        line = line[os.write(descriptor, line) :]
                except OSError:
                    os.ftruncate(descriptor, end)  # a full disk takes the first part of a line
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise unwritable(file, error) from error

    def last_metrics(self) -> dict:
        """Returns the last metrics row, {} where there is none."""
        row: dict = {}
        for row in read_rows(self.metrics_file):  # noqa: B007 - the last row is returned
            pass
        return row

    def discard_after(self, step: int) -> int:
        """Moves metric and evaluation rows of steps after `step` to discarded.jsonl. Returns how many."""
        kept, discarded = {}, []
        for file in (self.metrics_file, self.evaluations_file):
            rows = list(read_rows(file))
            kept[file] = [row for row in rows if row["step"] <= step]
            discarded += [{"file": file.name, **row} for row in rows if row["step"] > step]
        earlier = list(read_rows(self.discarded_file))
        if discarded:  # first here, so that a kill between the two writes loses none and, as times differ, doubles none
            write_rows(self.discarded_file, earlier + [row for row in discarded if row not in earlier])
        for file, rows in kept.items():
            if file.exists():  # rewritten even where no row goes: a crash may have cut its last line
                write_rows(file, rows)
        for folder in (self.rollouts, self.evaluations):
            for sample in folder.glob("step-*.parquet"):  # failed-*.parquet is evidence and stays
                if sample_step(sample) > step:
                    sample.unlink()
        return len(discarded)

    # ---- checkpoints

    def checkpoint(self, step: int) -> Path:
        """Returns the folder of the checkpoint of a step, whether there is one or not."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending: a folder under its final name is complete."""
        names = (path.name for path in self.checkpoints.glob("step-*"))
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    def publish_checkpoint(self, written: Path, step: int) -> Path:
        """Makes a fully written folder a checkpoint: fsync, then rename; nothing incomplete bears its name.

        The rows up to it reach the disk first: after a power failure no checkpoint lacks the rows of its steps.
        Raises OSError.
        """
        for file in (self.metrics_file, self.evaluations_file):
            sync_file(file)
        sync_tree(written)
        final = self.checkpoint(step)
        os.rename(written, final)
        sync_file(self.checkpoints)
        return final

    def best_checkpoint_step(self) -> int | None:
        """Returns the step of the checkpoint with the highest evaluated accuracy, the earliest of equals."""
        complete = set(self.checkpoint_steps())
        rows = (row for row in read_rows(self.evaluations_file) if row["step"] in complete and "accuracy" in row)
        scores = {row["step"]: row["accuracy"] for row in rows}
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
                for path in self.checkpoint(step).glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def clear_unfinished(self) -> None:
        """Removes what a killed process left half-written."""
        for pattern in (".writing*", ".old-*"):
            for path in self.checkpoints.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        folders = (self.path, self.rollouts, self.evaluations)
        for path in [path for folder in folders for path in folder.glob(".*.[0-9]*")]:
            if not path.name.startswith(".lock"):  # another process may just be asking for the lock
                path.unlink(missing_ok=True)


def write_rows(file: Path, rows: list[dict]) -> None:
    """Replaces the rows of a jsonl file: it holds the old ones or the new ones, whatever happens."""
    write_atomically(file, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def sample_step(sample: Path) -> int:
    """Returns the step of a sample file, such as step-00000040.parquet or failed-00000041-rank1.parquet."""
    return int(re.findall(r"\d+", sample.stem)[0])


def timestamp() -> str:
    """Returns the time of day as it stands in file names, such as 20260131-235959."""
    return time.strftime("%Y%m%d-%H%M%S")


if __name__ == "__main__":
    print(metric_table())
