"""What a run shows while it works: a bar in a terminal, a line every few steps in a log or a sweep."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINES_PER_RUN = 8


class Progress:
    """Progress of one run. name: printed before each line of a sweep; None for a single run.

    The bar needs a terminal; without one, and in a sweep where several runs share it, lines are printed instead.
    """

    def __init__(self, steps: int, name: str | None = None, quiet: bool = False):
        self.steps, self.name, self.quiet = steps, name, quiet
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.started, self.first_step, self.accuracy = time.monotonic(), None, None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=self.console, disable=name is not None or not sys.stdout.isatty() or quiet)
        self.task = None

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        if text:
            self.console.print(f"{self.name}: {text}" if self.name else text)

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        self._advance("warm start", step, steps, f"loss {loss:.2f}")

    def step(self, row: dict) -> None:
        facts = f"reward {row['reward_mean']:.2f}" if "reward_mean" in row else "no rollout scored"
        if self.accuracy is not None:
            facts += f"  accuracy {self.accuracy:.2f}"
        facts += f"  tokens {row['own_tokens_total']:,.0f}"
        self._advance("training", row["step"], self.steps, facts)

    def evaluation(self, row: dict) -> None:
        self.accuracy = row.get("accuracy")
        shown = "no sample scored" if self.accuracy is None else f"held-out accuracy {self.accuracy:.3f}"
        self.note(f"step {row['step']}: {shown} (avg@{row['samples']} on {row['prompts']} prompts)")

    def _advance(self, description: str, step: int, steps: int, facts: str) -> None:
        if self.bar.disable:
            if step % max(1, steps // LINES_PER_RUN) == 0 or step == steps:
                self.note(f"{description} {step}/{steps}  {facts}  left {self._left(description, step, steps)}")
            return
        if self.task is None or self.bar.tasks[-1].description != description:
            self.task = self.bar.add_task(description, total=steps, completed=step - 1, facts="")
        self.bar.update(self.task, completed=step, facts=facts)

    def _left(self, description: str, step: int, steps: int) -> str:
        if self.first_step is None or self.first_step[0] != description:
            self.first_step = (description, step - 1, self.started)
            self.started = time.monotonic()
        done = step - self.first_step[1]
        elapsed = time.monotonic() - self.first_step[2]
        return str(timedelta(seconds=round(elapsed / done * (steps - step))))
