"""What a run shows while it works: a bar in a terminal, a line every few steps in a log or a sweep."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from experiments.running.warning_signal import WARNING_VARIABLE

LINES_PER_RUN = 8


class Progress:
    """Shows the progress of one run, in its warm start and in its training.

    The bar needs a terminal; without one, and in a sweep where several runs share it, lines are printed instead.

    Args:
        steps: of the training.
        name: what each line of a run in a sweep begins with; None for a single run.
        quiet: shows nothing, as in all processes of a run but the first.
        clock: returns seconds.
    """

    def __init__(
        self, steps: int, name: str | None = None, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        self.steps, self.name, self.quiet, self.clock = steps, name, quiet, clock
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.accuracy: float | None = None
        self.warning = float(os.environ.get(WARNING_VARIABLE) or math.inf)
        self.first_report: tuple[str, int, float] | None = None  # description, step, time
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("{task.fields[left]}"),  # rich's own estimate forgets steps that are 30 s apart
        )
        self.bar = Bar(*columns, console=self.console, disable=name is not None or not sys.stdout.isatty() or quiet)
        self.task = None
        self.is_explained = False

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        """Prints a line; nothing for an empty text."""
        if text:
            self.console.print(f"{self.name}: {text}" if self.name else text)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        """Shows that `step` of `steps` steps of the tiny policy's warm start are done; explains it before the first."""
        if not self.is_explained:
            self.is_explained = True
            self.note(
                f"warm start: {steps} supervised steps on solved problems, because an untrained policy earns no "
                "reward. Once per task and machine: the policy is kept in $OTB_CACHE or ~/.cache/otb."
            )
        self.supervised(step, steps, loss)

    def supervised(self, step: int, steps: int, loss: float) -> None:
        """Shows that `step` of `steps` supervised steps are done."""
        self._advance("warm start", step, steps, f"loss {loss:.2f}")

    def step(self, row: dict) -> None:
        """Shows a row of metrics.jsonl."""
        facts = f"reward {row['reward_mean']:.2f}" if "reward_mean" in row else "no rollout scored"
        if self.accuracy is not None:
            facts += f"  held-out {self.accuracy:.2f}"
        facts += f"  tokens {row['own_tokens_total']:,.0f}"
        self._advance("training", row["step"], self.steps, facts)
        if row.get("seconds_step", 0.0) > self.warning:
            self.note(
                f"step {row['step']} took {row['seconds_step']:.0f} s, longer than the {self.warning:.0f} s between "
                "SLURM's warning and the time limit: a limit would cost all since the last checkpoint. Try a larger "
                "hydra.launcher.signal_delay_s, or a smaller checkpoint_every."
            )
            self.warning = math.inf  # said once

    def evaluation(self, row: dict) -> None:
        """Prints the measures of a held-out set: a row of evaluations.jsonl, or with `task` that of a further set."""
        accuracy, kind = row.get("accuracy"), f"{row['task']} accuracy" if "task" in row else "held-out accuracy"
        if "task" not in row:
            self.accuracy = accuracy
        result = "no sample scored" if accuracy is None else f"{kind} {accuracy:.3f}"
        self.note(f"step {row['step']}: {result} (avg@{row['samples']} on {row['prompts']} prompts)")

    def _advance(self, description: str, step: int, steps: int, facts: str) -> None:
        left = self._left(description, step, steps)
        if self.bar.disable:
            if step % max(1, steps // LINES_PER_RUN) == 0 or step == steps:
                self.note("  ".join(filter(None, [f"{description} {step}/{steps}", facts, left])))
            return
        if self.task is None or self.bar.tasks[-1].description != description:
            self.task = self.bar.add_task(description, total=steps, completed=step - 1, facts="", left="")
        self.bar.update(self.task, completed=step, facts=facts, left=left)

    def _left(self, description: str, step: int, steps: int) -> str:
        """Returns the time left by the mean time of a step since the first report, which itself has none yet: ""."""
        now = self.clock()
        if self.first_report is None or self.first_report[0] != description:
            self.first_report = (description, step, now)
        _, first_step, started = self.first_report
        if step == first_step:
            return ""
        return f"left {timedelta(seconds=round((now - started) / (step - first_step) * (steps - step)))}"
