"""Keeps a run's last rollouts, and stops the run if a loss or gradient is not finite. RunTrainer uses both."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from experiments.running.rollout_rows import rollout_rows, write_parquet
from otb.errors import RunError
from otb.methods import Method, Step
from otb.records import RunDirectory, sample_step


class KeptRollouts(Method):
    """Keeps the last batch of rollouts in memory until the next batch comes, and writes it on request."""

    def __init__(self, directory: RunDirectory):
        self.directory = directory
        self._step: Step | None = None
        self._endings: list[str] = []

    def finish(self, step: Step) -> None:
        self._step, self._endings = step, self.trainer.endings

    def write(self, name: str, groups: int | None) -> Path:
        """Writes this process's rollouts to rollouts/NAME.parquet and returns the path.

        groups: as in `rollout_rows`, which lists the columns. If no batch has been kept, nothing is written.
        """
        path, trainer = self.directory.rollouts / f"{name}.parquet", self.trainer
        if self._step is None:
            return path
        rows = rollout_rows(self._step, self._endings, trainer._tokenizer, groups, trainer.accelerator.process_index)
        write_parquet(pd.DataFrame({"step": sample_step(path)} | row for row in rows), path)
        return path


class FiniteCheck(Method):
    """Raises RunError if a loss or gradient is not finite, before the weights change.

    kept: writes the rollouts that caused it.
    """

    def __init__(self, kept: KeptRollouts):
        self.kept = kept
        self._losses: list[Tensor] = []  # one per micro-batch since the last optimizer step

    def after_micro_batch(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def gradient(self, norm):
        losses, self._losses = torch.stack(self._losses).sum(), []
        self._refuse("loss", self.trainer.accelerator.gather(losses).sum())  # a bad loss in one process stops all
        self._refuse("gradient_norm", norm)
        return norm

    def _refuse(self, name: str, value) -> None:
        if value is None or math.isfinite(float(value)):
            return
        step, rank = self.trainer.state.global_step + 1, self.trainer.accelerator.process_index
        path = self.kept.write(f"failed-{step:08d}" + (f"-rank{rank}" if rank else ""), groups=None)
        raise RunError(
            f"{name}={float(value)} at step {step}; it must be finite, and training stops before the weights change. "
            f"To see the rollouts that caused it ({path.name}): python -m analysis.runs.show "
            f"{self.kept.directory.path} --step {step}. Try a smaller learning_rate."
        )
