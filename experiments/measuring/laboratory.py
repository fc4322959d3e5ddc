"""Samples rollouts, measures their exact scores and compares estimators on them.

experiments/variance.py calls it with a checked configuration.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from peft import get_peft_model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.trainer_utils import set_seed

from experiments.measuring.variance_table import report
from experiments.running.command_line import CONF
from experiments.running.grpo_options import RunOptions
from experiments.running.policy import base_and_adapter, lora_config
from experiments.running.train import Inputs, checked_inputs, quiet_libraries
from otb.errors import RunError
from otb.exact_norms import trainable
from otb.laboratory import workers
from otb.laboratory.estimators import Prompt, fitted
from otb.laboratory.sampling import Sampler
from otb.laboratory.scores import Measured
from otb.policies.models import load_model
from otb.sandbox import Sandbox
from otb.tasks import Task
from otb.training.options import refuse_generation_config

# Its gradients estimate the true gradient: it is unbiased, and independent of the rollouts that it is measured on.
REFERENCE = "energy_probe"
ROLLOUTS_AT_ONCE = 512


def laboratory(cfg: DictConfig, names: list[str], folder: Path, task: Task, sandbox: Sandbox | None) -> None:
    """Makes everything from rollouts to tables and figures in `folder`, and measures nothing twice."""
    quiet_libraries()
    inputs = checked_inputs(cfg, task, sandbox)
    with Steps() as steps:
        load = saved_policy(cfg, task, folder, steps)
        start = (load, cfg.sketch, cfg.temperature)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(cfg.workers or len(os.sched_getaffinity(0)), spawn, workers.start, start) as pool:
            files = Measurements(cfg, inputs, load, folder, pool, steps)
            rows = judged(cfg, names, files, pool, steps)
    report(rows, [Prompt(Measured.load(file)) for file in files.judged], folder)


class Steps:
    """Shows progress: a bar per stage of the work, or a line without a terminal."""

    def __init__(self):
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns)

    def __enter__(self) -> Steps:
        self._bars.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bars.stop()

    def follow(self, description: str, total: int, submitted: Iterable[Future]) -> list:
        """Waits for the futures and returns their results, in the order of submission; raises their errors.

        total: number of results at the end, including those of earlier commands. Submission may take long.
        """
        bar, futures = self._bars.add_task(description, total=total), []
        for future in submitted:
            future.add_done_callback(lambda _: self._bars.advance(bar))
            futures.append(future)
        results = [future.result() for future in futures]
        self._bars.update(bar, completed=total)  # results of earlier commands count as done
        if not self._bars.console.is_terminal:
            print(f"{description}: {total} done, {total - len(results)} of them earlier", flush=True)
        return results

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        """Shows that `step` of `steps` supervised steps are done."""
        if not self._bars.tasks:
            self._bars.add_task("warm start", total=steps)
        self._bars.update(self._bars.task_ids[0], completed=step)


def saved_policy(cfg: DictConfig, task, folder: Path, steps: Steps) -> Callable:
    """Returns a function that loads the policy in any process; a fresh LoRA adapter is drawn once and kept in `folder`.

    Raises RunError if the policy cannot be loaded, has too many parameters for exact scores, or would not be sampled
    from its softmax.
    """
    checkpoint = None if cfg.checkpoint is None else Path(cfg.checkpoint).expanduser().resolve()
    base, adapter = base_and_adapter(cfg, task, checkpoint, steps.warm_start)
    if adapter is None and (lora := lora_config(cfg)) is not None:
        adapter = str(folder / "adapter")
        if not Path(adapter).exists():
            set_seed(cfg.seed)
            fresh = get_peft_model(load_model(base, cfg.model.revision, "float32"), lora)
            fresh.save_pretrained(f"{adapter}.writing")
            os.replace(f"{adapter}.writing", adapter)
    load = partial(workers.load_policy, base, cfg.model.revision, adapter)
    model = load()
    try:
        trainable(model)
        refuse_generation_config(RunOptions(log_energy=True), model.generation_config.to_dict())
    except ValueError as error:
        raise RunError(str(error)) from error
    return load


class Measurements:
    """Makes the files of measured prompts. Only complete files get their final name, so a killed command can resume.

    judged: files of the prompts with exact scores, on which estimators are compared.
    fit: files of other prompts, for baselines that learn.
    bounds: the oracle's file of each judged prompt, None without one.
    """

    def __init__(self, cfg: DictConfig, inputs: Inputs, load: Callable, folder: Path, pool, steps: Steps):
        self._cfg, self._inputs, self._load, self._pool = cfg, inputs, load, pool
        self._sampler: Sampler | None = None
        self._folder = folder
        (folder / "prompts").mkdir(exist_ok=True)
        rows = list(inputs.rows.train)
        # From both ends of the dataset, so that a change of one number does not affect the other's files.
        fit = rows[::-1][: cfg.fit_steps * cfg.prompts_per_step]
        if len(fit) + cfg.prompts > len(rows):
            raise RunError(
                f"prompts={cfg.prompts} and fit_steps={cfg.fit_steps} x prompts_per_step={cfg.prompts_per_step} need "
                f"{len(fit) + cfg.prompts} prompts, but the task has {len(rows)}. Try fit_steps=5."
            )
        judged, bounded = rows[: cfg.prompts], rows[: min(cfg.oracle.prompts, cfg.prompts)]
        steps.follow("exact scores", len(judged), self._measured("judged", judged, cfg.samples))
        steps.follow("prompts to fit on", len(fit), self._measured("fit", fit, max(cfg.group_sizes)))
        if inputs.environment is None and bounded:
            steps.follow("oracle", len(bounded), self._bounded(bounded))
        self.judged = [self._file("judged", i, cfg.samples) for i in range(cfg.prompts)]
        self.fit = [self._file("fit", i, max(cfg.group_sizes)) for i in range(len(fit))]
        self.bounds = [file if (file := self._bound_file(i)).exists() else None for i in range(cfg.prompts)]

    def _file(self, kind: str, index: int, samples: int) -> Path:
        return self._folder / "prompts" / f"{kind}-{index:04d}-{samples}.npz"

    def _bound_file(self, index: int) -> Path:
        oracle = self._cfg.oracle
        name = f"oracle-{index:04d}-{self._cfg.samples}-{oracle.rollouts}-{oracle.continuations}.pt"
        return self._folder / "prompts" / name

    def _measured(self, kind: str, rows: list[dict], samples: int) -> Iterator[Future]:
        """Samples the prompts that have no file yet and hands their rollouts to the pool.

        kind: "judged" samples one prompt at a time and measures exact scores; "fit" does neither.
        """
        at_once = 1 if kind == "judged" else max(1, ROLLOUTS_AT_ONCE // samples)
        for start in range(0, len(rows), at_once):  # fixed chunks always give the same rollouts
            files = [self._file(kind, i, samples) for i in range(start, min(start + at_once, len(rows)))]
            if all(file.exists() for file in files):
                continue
            drawn = self._sample(kind, rows[start : start + at_once], start, samples)
            for file, rollouts in zip(files, drawn, strict=True):
                if file.exists():
                    continue
                measure = partial(workers.measure_prompt, rollouts, kind == "judged")
                yield self._pool.submit(workers.whole_file, measure, file)

    def _bounded(self, rows: list[dict]) -> Iterator[Future]:
        """Continues the first judged rollouts of each prompt, which are drawn again for this."""
        cfg = self._cfg
        for i, row in enumerate(rows):
            if self._bound_file(i).exists():
                continue
            drawn = self._sample("judged", [row], i, cfg.samples)[0][: cfg.oracle.rollouts]
            known = Measured.load(self._file("judged", i, cfg.samples))
            if [int(rollout.own.sum()) for rollout in drawn] != known.lengths[: len(drawn)].tolist():
                raise RunError(
                    f"{self._folder} was measured on a machine that draws other rollouts from the same seed, but the "
                    "oracle must continue the measured ones. Remove the folder, or use oracle.prompts=0."
                )
            inputs, seed = self._inputs, cfg.seed + i
            bound = partial(
                workers.bound_prompt, inputs.tokenizer, inputs.task, row, drawn, cfg.oracle.continuations, seed
            )
            yield self._pool.submit(workers.whole_file, bound, self._bound_file(i))

    def _sample(self, kind: str, rows: list[dict], first: int, samples: int) -> list:
        if self._sampler is None:
            inputs = self._inputs
            source = (inputs.tokenizer, inputs.task, inputs.environment)
            self._sampler = Sampler(self._load(), *source, self._cfg.temperature, str(self._folder))
        offset = {"judged": 0, "fit": 500_000}[kind]
        return self._sampler.rollouts(rows, samples, seed=self._cfg.seed * 1_000_000 + offset + first)


def judged(cfg: DictConfig, names: list[str], files: Measurements, pool, steps: Steps) -> pd.DataFrame:
    """Returns a row of moments per prompt, estimator and group size."""
    fit = [Prompt(Measured.load(file)) for file in files.fit]
    sizes = list(cfg.group_sizes)
    estimators = {}
    for name in names:
        baseline = instantiate(OmegaConf.load(CONF / "baseline" / f"{name}.yaml"))
        estimators |= {(name, size): fitted(baseline, fit, size, cfg.prompts_per_step) for size in sizes}
    reference = estimators[REFERENCE, max(sizes)]
    prompts = zip(range(cfg.prompts), files.judged, files.bounds, strict=True)
    comparison = (estimators, reference, cfg.partitions)
    futures = (pool.submit(workers.prompt_moments, index, file, *comparison, bound) for index, file, bound in prompts)
    return pd.DataFrame([row for rows in steps.follow("estimators", cfg.prompts, futures) for row in rows])
