"""Draws, grades and keeps the samples of evaluations; experiments/evaluate.py calls it with a checked plan.

Samples are drawn in fixed batches (`folder.Batches`). The random state of a batch depends only on the seed, the task
and the batch's number. So a batch that a kill cut short is drawn again unchanged, and several processes, which take
turns, draw the same samples as one.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from omegaconf import OmegaConf

from experiments.evaluation.folder import Batches, EvaluationFolder, batch_seed, hold, samples_together
from experiments.evaluation.inputs import Inputs, data_facts, task_inputs
from experiments.evaluation.policies_of import Checkpoint, Plan
from experiments.evaluation.sampling import SamplingTrainer, sample_rows, trainer_options, ungraded
from experiments.evaluation.weights import Policies
from experiments.running.build import build
from experiments.running.devices import emulated_bfloat16
from experiments.running.environment import describe
from experiments.running.policy import described, make_weights_folder
from experiments.running.progress import Progress
from experiments.running.run_lock import RunLock
from experiments.running.run_trainer import RESUME_FILES
from experiments.running.threads import use_threads
from experiments.running.train import quiet_libraries
from otb.baselines.none import none
from otb.errors import RunError
from otb.files import write_atomically
from otb.policies.models import model_facts
from otb.training.trainer import OTBConfig

POLL_SECONDS = 2.0  # between searches for new checkpoints; far less than any timeout of the other processes


def evaluate(plan: Plan) -> None:
    """Completes every evaluation of the plan to k samples per problem; with `watch`, until the run is over.

    Raises RunError for bad data, a bad model, or a folder that another process writes.
    """
    quiet_libraries()
    with EvaluationProgress(0, quiet=int(os.environ.get("RANK", 0)) > 0) as progress:
        evaluator = Evaluator(plan, progress)
        told = False
        while True:
            over = agreed(not plan.cfg.watch or plan.run_is_over())  # before the search, so no checkpoint is missed
            worked = evaluator.evaluate_all(agreed(plan.checkpoints()))
            if over:
                return
            if worked or not told:
                progress.note(f"waiting for the next checkpoint of {plan.cfg.run}")
                told = True
            time.sleep(POLL_SECONDS)


def agreed(value):
    """Returns the first process's value to all processes, since files may change between their reads."""
    return broadcast_object_list([value])[0]


class EvaluationProgress(Progress):
    """Shows progress over the batches of successive evaluations."""

    def batch(self, name: str, done: int, total: int, rows: list[dict]) -> None:
        """Shows that `done` of `total` batches are complete. rows: the newest samples."""
        right, scored = sum(row["reward"] == 1 for row in rows), sum(row["reward"] is not None for row in rows)
        self._advance(name, done, total, f"right {right} of the last {scored}")


class Evaluator:
    """Evaluates policies of one architecture on the tasks of a plan.

    Raises RunError if a task's rows, the tokenizer and the limits do not fit together, before any weights are read.
    """

    def __init__(self, plan: Plan, progress: EvaluationProgress):
        self.plan, self.progress = plan, progress
        cfg = next(iter(plan.configurations.values()))  # they share one model
        make_weights_folder(cfg, next(iter(plan.tasks.values())), progress.warm_start)
        self.tokenizer, model_config = described(cfg)
        use_threads(plan.cfg.threads, model_config)
        self.inputs = {
            name: task_inputs(one, plan.tasks[name], plan.sandbox, self.tokenizer, model_config)
            for name, one in plan.configurations.items()
        }
        options = trainer_options(list(self.inputs.values()), self.tokenizer.eos_token_id)
        self.arguments = OTBConfig(**options)  # also starts the process group
        progress.note(emulated_bfloat16(cfg.model.dtype, self.arguments.use_cpu))
        self.is_main = self.arguments.process_index == 0
        self.policies = Policies(progress.warm_start)
        self._trainers: dict[bool, SamplingTrainer] = {}  # with tools or without

    def evaluate_all(self, checkpoints: list[Checkpoint]) -> bool:
        """Evaluates these policies on all tasks; returns whether there was anything to do.

        A run keeps only its last and best checkpoints, so a checkpoint is held during its evaluation. A checkpoint that
        the run has already removed is skipped.
        """
        worked, k = False, self.plan.cfg.k
        for checkpoint in checkpoints:
            pending = agreed([task for task in self.inputs if not self.plan.folder(task, checkpoint).has(k)])
            if not pending:
                continue
            path = checkpoint.path
            if checkpoint.step is not None:
                held = self.plan.held(checkpoint.step)
                path = agreed(hold(checkpoint.path, held, RESUME_FILES) if self.is_main else None)
                if path is None:
                    self.progress.note(f"step {checkpoint.step}: skipped, because the run has removed this checkpoint")
                    continue
            for task in pending:
                self.evaluate(task, checkpoint, path)
            if checkpoint.step is not None and self.is_main:
                shutil.rmtree(path)
            worked = True
        return worked

    def evaluate(self, name: str, checkpoint: Checkpoint, weights: Path | None) -> None:
        """Draws the missing samples of one policy on the task `name`, and writes its results.

        weights: the folder of the checkpoint, or of its held copy; None for the model itself.
        """
        inputs, k = self.inputs[name], self.plan.cfg.k
        folder = self.plan.folder(name, checkpoint)
        batches = Batches(len(inputs.rows), samples_together(k), inputs.cfg.rollouts_per_batch, self._parts)
        if self.is_main:
            folder.path.mkdir(parents=True, exist_ok=True)
        with RunLock(folder.path) if self.is_main else nullcontext() as lock:
            first = agreed(begin(folder, inputs, batches) if self.is_main else None)
            if first < batches.count(k):
                trainer = self._trainer(inputs, weights)
                if self.is_main:
                    self._note_start(folder, inputs, checkpoint)
                self._draw(trainer, folder, inputs, batches, first, lock)
            if self.is_main:
                drawn = max(first, batches.count(k)) // batches.in_round * batches.samples
                folder.write_results(k, drawn, self._facts(name, checkpoint))
        agreed(None)  # the other processes wait for the results

    # ---- samples

    def _trainer(self, inputs: Inputs, weights: Path | None) -> SamplingTrainer:
        """Returns the sampling trainer, with these weights in its model and the limits of the task."""
        recorded = self.plan.recorded
        task = inputs.task if recorded is None else build(recorded, "task")
        if self.policies.load(inputs.cfg, task, weights):
            for trainer in self._trainers.values():
                trainer.weights_changed()
        with_tools = inputs.environment is not None
        if with_tools not in self._trainers:
            try:
                self._trainers[with_tools] = SamplingTrainer(
                    self.policies.model,
                    ungraded,
                    self.arguments,
                    Dataset.from_list(inputs.rows[:1]),
                    processing_class=self.tokenizer,
                    environment_factory=inputs.environment,
                    baseline=none,
                )
            except (ImportError, ValueError, ConnectionError) as error:
                reason = (str(error).strip().splitlines() or [""])[0]
                raise RunError(f"the trainer cannot be built: {type(error).__name__}: {reason}") from error
            self.policies.model.eval()
        self._trainers[with_tools].use_limits_of(inputs.task)
        return self._trainers[with_tools]

    def _draw(self, trainer, folder: EvaluationFolder, inputs: Inputs, batches: Batches, first: int, lock) -> None:
        """Draws the batches from `first` on, one per copy of the policy at a time."""
        total, label = batches.count(self.plan.cfg.k), f"{folder.path.parent.name}/{folder.path.name}"
        worker, part = divmod(self.arguments.process_index, self._parts)
        workers = self.arguments.world_size // self._parts
        for start in range(first, total, workers):
            # Processes must sample together, so a process without a batch draws the last batch again, in vain.
            samples = self._batch(trainer, inputs, batches, min(start + worker, total - 1), part)
            rows = gather_object(samples if start + worker < total else [])
            if self.is_main:
                if not lock.held():
                    raise RunError(f"{folder.path} was taken over by another process, so this process stops.")
                folder.append(rows)
                self.progress.batch(label, min(start + workers, total), total, rows)

    def _batch(self, trainer: SamplingTrainer, inputs: Inputs, batches: Batches, batch: int, part: int) -> list[dict]:
        """Returns the samples of one batch, or of this process's part of it."""
        pairs, count = batches.drawn_by(batch, part)
        rows = [inputs.rows[problem] for problem, _ in pairs]
        responses = trainer.responses(rows, batch_seed(inputs.cfg.seed, inputs.task.name, batch))
        return sample_rows(inputs.task, rows[:count], pairs[:count], responses[:count], self.tokenizer.decode)

    @property
    def _parts(self) -> int:
        """Processes that share one copy of the policy and draw a batch together."""
        options = self.arguments
        return options.vllm_tensor_parallel_size if options.use_vllm and options.vllm_mode == "colocate" else 1

    # ---- records of the evaluation

    def _note_start(self, folder: EvaluationFolder, inputs: Inputs, checkpoint: Checkpoint) -> None:
        """Writes config.yaml and environment.json."""
        write_atomically(folder.config_file, OmegaConf.to_yaml(inputs.cfg, resolve=True))
        revision = inputs.cfg.model.revision
        facts = model_facts(self.policies.source, revision) | {"data": data_facts(inputs)}
        if self.policies.base is not None:
            facts["model_base"] = model_facts(self.policies.base, revision)
        if checkpoint.step is not None:
            facts["model"] = str(checkpoint.path)  # not the held copy
        command = ["python", "experiments/evaluate.py", *(argument.lstrip("+") for argument in sys.argv[1:])]
        write_atomically(folder.record.environment_file, describe(command, folder.record, facts))

    def _facts(self, name: str, checkpoint: Checkpoint) -> dict:
        """Returns the entries of results.json other than the measures."""
        inputs = self.inputs[name]
        facts = {"task": name, "policy": self.plan.name, "step": checkpoint.step, "problems": len(inputs.rows)}
        return facts | {"temperature": inputs.cfg.temperature, "seed": inputs.cfg.seed}


def begin(folder: EvaluationFolder, inputs: Inputs, batches: Batches) -> int:
    """Prepares the folder for more samples; returns the number of complete batches in it."""
    folder.keep_problems(inputs.rows)
    return folder.resume(batches)
