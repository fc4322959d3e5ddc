"""Defines RunTrainer: an OTBTrainer that writes records, samples, evaluations and checkpoints into a run directory.

experiments/running/train.py builds it; scripts outside this project use OTBTrainer. At the end of a step it writes the
metrics row, then samples, evaluation and checkpoint if they are due. In this order everything up to a checkpoint is on
disk before the checkpoint.
"""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import GRPOTrainer

from experiments.running import trackers
from experiments.running.data import told_by_the_first
from experiments.running.grpo_options import RunOptions
from experiments.running.held_out import HeldOut
from experiments.running.held_out_sampler import HeldOutSampler, Samples
from experiments.running.kept_rollouts import FiniteCheck, KeptRollouts
from experiments.running.prompt_sampler import PromptSampler
from experiments.running.rollout_rows import write_parquet
from experiments.running.run_lock import RunLock
from experiments.running.warning_signal import finishing_the_step, interruption, received
from otb.errors import RunError, unwritable
from otb.methods.improvement_update import STATE as IMPROVEMENT_STATE
from otb.methods.token_weights import STATE as TOKEN_WEIGHTS_STATE
from otb.records import RunDirectory, read_rows
from otb.records.metric_names import METRICS
from otb.training.trainer import BASELINE_STATE, OTBTrainer

TRL_NAMES = {  # TRL's metric names -> ours
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "entropy": "entropy",
    "kl": "kl",
    "learning_rate": "learning_rate",
    "completions/clipped_ratio": "truncated",
    "grades/correct": "grade_correct",
    "grades/wrong": "grade_wrong",
    "grades/unparsable": "grade_unparsable",
    "grades/grader_timeout": "grade_timeout",
    "grades/grader_error": "grade_error",
    "sampling/sampling_logp_difference/mean": "mismatch_mean",
    "sampling/sampling_logp_difference/max": "mismatch_max",
    "sampling/importance_sampling_ratio/min": "importance_ratio_min",
    "sampling/importance_sampling_ratio/mean": "importance_ratio_mean",
    "sampling/importance_sampling_ratio/max": "importance_ratio_max",
}
RESUME_FILES = (  # files of a checkpoint that only a resumed run reads; an auxiliary head belongs to the policy
    BASELINE_STATE,
    TOKEN_WEIGHTS_STATE,
    IMPROVEMENT_STATE.format("*"),
    "global_step*",  # DeepSpeed: weights and optimizer state in parts
    "latest",
    "optimizer*",  # a folder of parts under FSDP2
    "pytorch_model_fsdp*",
    "rng_state*",
    "scaler*",
    "scheduler*",
    "zero_to_*.py",
)


@dataclass(frozen=True)
class Schedule:
    """Holds the periods of recurring work, in steps; 0 = never. Work with a period also happens at the final step."""

    evaluate_every: int
    evaluation_samples: int  # k, samples per held-out prompt
    checkpoint_every: int
    rollouts_every: int
    rollouts_groups: int  # prompt groups kept per recorded step


class RunTrainer(OTBTrainer):
    """Trains in a run directory. The run can be killed at any moment and resumed from its last checkpoint.

    Args:
        directory: the run directory.
        lock: held by the first process, which does the writing; None in the others.
        schedule: when to evaluate, keep samples and write checkpoints.
        held_out: the evaluation sets. The first is the task's own; it decides which checkpoint is the best.
        on_step: called with each metrics row, for a progress display.
        on_evaluation: called with each evaluation row.
        All other arguments are as in OTBTrainer.

    Raises:
        RunError: a file cannot be written, the lock was lost, or a loss or gradient is not finite.
        Interrupted: a warning signal or Ctrl-C came, and the checkpoint is written.
    """

    words = RunOptions

    def __init__(
        self,
        *args,
        directory: RunDirectory,
        lock: RunLock | None,
        schedule: Schedule,
        held_out: list[HeldOut],
        on_step: Callable[[dict], None],
        on_evaluation: Callable[[dict], None],
        **kwargs,
    ):
        self.directory, self.lock, self.schedule = directory, lock, schedule
        self.held_out = held_out
        self.on_step, self.on_evaluation = on_step, on_evaluation
        self._step_started = time.perf_counter()
        self.kept_rollouts = KeptRollouts(directory)
        super().__init__(*args, methods=[self.kept_rollouts, FiniteCheck(self.kept_rollouts)], **kwargs)
        self.sampler = HeldOutSampler(self)
        totals = directory.last_metrics()
        self._totals = {name: totals.get(name, 0) for name in ("own_tokens_total", "tool_tokens_total")}
        self.add_callback(RunCallback(self))

    def _get_train_sampler(self, dataset=None) -> Sampler:
        return PromptSampler(
            rows=len(self.train_dataset if dataset is None else dataset),
            prompts_per_batch=self.args.generation_batch_size // self.num_generations,
            group_size=self.num_generations,
            uses=self.num_iterations * self.args.steps_per_generation,
            micro_batches=self.args.max_steps * self.args.gradient_accumulation_steps,
            seed=self.args.seed,
        )

    # ---- a step: row, samples, evaluation, checkpoint, status, in this order

    def train(self, *args, **kwargs):
        self._step_started = time.perf_counter()
        with finishing_the_step(say=self.accelerator.is_main_process):
            return super().train(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        last_done = self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)  # writes the row, see `log`
        step, schedule = self.state.global_step, self.schedule
        if step == last_done:  # transformers calls it again at the end of the epoch
            return
        if self._due(step, schedule.rollouts_every) and self.accelerator.is_main_process:
            self.kept_rollouts.write(f"step-{step:08d}", schedule.rollouts_groups)
        if self._due(step, schedule.evaluate_every):
            self.evaluate_held_out()
        interrupted = self._due(step, 1) and self._any_process_warned()
        if interrupted or self._due(step, schedule.checkpoint_every):
            self.write_checkpoint()
        if self.accelerator.is_main_process and self.directory.status().get("state") != "failed":  # another process has
            self.directory.write_status("running", step=step, steps=self.state.max_steps)
        if interrupted and step < self.state.max_steps:
            raise interruption(step)
        self._step_started = time.perf_counter()

    def _any_process_warned(self) -> bool:
        """Tells whether any process got a warning signal. All processes get the same answer and stop at one step."""
        if self.accelerator.num_processes == 1:
            return received()
        return bool(self.accelerator.gather(torch.tensor([received()], device=self.accelerator.device)).any())

    def _append(self, file: Path, row: dict) -> None:
        """Appends a row to a file of the run, in the first process only. Raises RunError if the lock was lost."""
        if not self.accelerator.is_main_process:
            return
        if self.lock is not None and not self.lock.held():
            raise RunError(f"{self.directory.path} was taken over by another process; this one stops here.")
        self.directory.append(file, row)

    def _due(self, step: int, every: int) -> bool:
        """Tells whether `step` is the first generation boundary at or after a multiple of `every`, or the final step.

        every: 0 for never. At a boundary the next step needs new rollouts, so no buffered rollouts would be lost.
        """
        cycle = max(1, self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps)
        if not every or step % cycle:
            return False
        return step == self.state.max_steps or step // every > (step - cycle) // every

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Writes a step's row under our names, and passes it to TRL's log with all that TRL measured."""
        if not self.model.training or "loss" not in logs:
            return super().log(logs, start_time)
        measured = {
            name: mean for name, values in self._metrics["train"].items() if (mean := finite_mean(values)) is not None
        }
        measured |= {
            ours: value for trl, ours in TRL_NAMES.items() if (value := (logs | measured).get(trl)) is not None
        }
        measured |= {f"seconds_{part}": seconds for part, seconds in self.seconds.items()}
        measured["seconds_step"] = time.perf_counter() - self._step_started
        parts = ("sampling", "scoring", "advantages", "improvement")
        measured["seconds_loss"] = measured["seconds_step"] - sum(self.seconds.get(part, 0.0) for part in parts)
        measured["peak_memory_bytes"] = peak_memory_bytes()
        for part in ("own_tokens", "tool_tokens"):
            self._totals[f"{part}_total"] += measured.get(part) or 0
        measured |= {name: total for name, total in self._totals.items() if total}
        row = {"step": self.state.global_step}
        row |= {name: value for name in METRICS if (value := measured.get(name)) is not None}
        logs.update(row)  # every tracker of `report_to` gets our names besides TRL's
        trackers.advance(self.args.report_to, self.state.global_step)
        super().log(logs, start_time)
        self.seconds.clear()
        self._append(self.directory.metrics_file, row)
        self.on_step(row)

    # ---- evaluation

    def evaluate_held_out(self) -> dict:
        """Measures avg@k and pass@k on the held-out sets, keeps every sample, and returns the row of the first set.

        It uses a separate random state, so an evaluation does not change training. The row is written last: where there
        is a row, there are also samples.
        """
        tables, rows = [], []
        for held_out in self.held_out:
            started = time.perf_counter()
            samples = self.sampler.samples(held_out, self.schedule.evaluation_samples)
            row = self._evaluation_row(samples, started)
            if self.args.report_to:
                prefix = f"eval_{held_out.name}" if rows else "eval"
                # Not GRPOTrainer.log, which would write its table of training completions again.
                named = {f"{prefix}_{name}": value for name, value in row.items() if name != "step"}
                super(GRPOTrainer, self).log(named)
            rows.append(row if not rows else {"task": held_out.name} | row)
            tables.append(samples.table(held_out.name, with_tools=bool(self.environment_factories)))
            self.on_evaluation(rows[-1])
        self._save_samples(pd.concat(tables, ignore_index=True))
        self._append(self.directory.evaluations_file, rows[0])
        return rows[0]

    def _evaluation_row(self, samples: Samples, started: float) -> dict:
        """Returns the row of one set, with the names of EVALUATION_METRICS. Unmeasured values are absent."""
        scored, right = ~samples.rewards.isnan(), samples.rewards == 1
        row = {
            "step": self.state.global_step,
            "accuracy": right[scored].float().mean().item() if scored.any() else None,
            "pass_at_k": right.any(1)[scored.any(1)].float().mean().item() if scored.any() else None,
            "samples": samples.rewards.shape[1],
            "prompts": len(samples.rewards),
            "response_length_mean": samples.own_tokens.float().mean().item(),
            "own_tokens_total": self._totals["own_tokens_total"],
            "seconds": time.perf_counter() - started,
        }
        if unscored := (~scored).float().mean().item():
            row["unscored"] = unscored
        return {name: value for name, value in row.items() if value is not None}

    def _save_samples(self, table: pd.DataFrame) -> None:
        """Writes the samples of an evaluation, in the first process."""
        if self.accelerator.is_main_process:
            write_parquet(table, self.directory.evaluation_samples(self.state.global_step))

    # ---- checkpoints

    def write_checkpoint(self) -> None:
        """Writes a checkpoint to a temporary folder, renames it once it is complete, and then prunes older ones.

        The last checkpoint and the one with the best evaluation remain; only the last keeps the optimizer's state.
        Raises RunError if it cannot be written.
        """
        writing, step = self.directory.checkpoints / ".writing", self.state.global_step
        if self.accelerator.is_main_process:
            shutil.rmtree(writing, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        output_dir, self.args.output_dir = self.args.output_dir, str(writing)
        try:
            self._save_checkpoint(self.model, trial=None)
            if self.is_fsdp_enabled:
                self._save_whole_policy(writing / f"checkpoint-{step}")
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                self.directory.publish_checkpoint(writing / f"checkpoint-{step}", step)
                shutil.rmtree(writing)
                self.directory.prune_checkpoints(RESUME_FILES)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError if the disk is full
            shutil.rmtree(writing, ignore_errors=True)
            raise unwritable(self.directory.checkpoints, error) from error
        finally:
            self.args.output_dir = output_dir
        self.accelerator.wait_for_everyone()

    def _save_whole_policy(self, folder: Path) -> None:
        """Writes the whole policy into a sharded checkpoint, so `model.name=FOLDER` can read it.

        FSDP's checkpoint consists of shards, without configuration, tokenizer and whole weights. The weights written
        here have the precision of the forward. Every process must call it, because gathering is a collective operation.
        """
        weights = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
        self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=weights)
        self._tokenizer.save_pretrained(folder)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes no model card, because the run directory documents the checkpoint."""


class RunCallback(TrainerCallback):
    """Evaluates before the first step, and advances W&B's step count.

    It is a callback because trackers must start before anything is timed.
    """

    def __init__(self, trainer: RunTrainer):
        self.trainer = trainer

    def on_train_begin(self, *args, **kwargs) -> None:
        # All processes need one answer, because an evaluation gathers; another host may see an older file.
        if not told_by_the_first(lambda: any(read_rows(self.trainer.directory.evaluations_file))):
            self.trainer.evaluate_held_out()
            self.trainer._step_started = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        trackers.advance(args.report_to, state.global_step, before_next=True)


def finite_mean(values: list[float]) -> float | None:
    """Returns the mean of the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return finite[0] if finite else None  # a single count stays an int
    return sum(finite) / len(finite)


def peak_memory_bytes() -> int:
    """Returns the peak memory so far, in bytes: of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
