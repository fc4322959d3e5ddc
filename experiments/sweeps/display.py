"""What a sweep shows while its command waits for it: one table in a terminal, a line per event in a log."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from experiments.running.progress import LINES_PER_RUN
from experiments.running.summary import distinct_names
from experiments.sweeps.state import RunState, counts, state_table


class SweepDisplay:
    """Shows where the runs stand: `with SweepDisplay() as display: display.show(states)`, again and again."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True, markup=False)
        self.live = Live(console=Console(), auto_refresh=False, transient=True) if sys.stdout.isatty() else None
        self.shown: dict[Path, tuple[str, int]] = {}

    def __enter__(self) -> SweepDisplay:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception) -> None:
        if self.live:
            self.live.stop()

    def show(self, states: list[RunState]) -> None:
        """Draws the table anew, or prints a line for each run whose state or progress has changed."""
        if self.live:
            self.live.update(Group(state_table(states), Text(counts(states))), refresh=True)
            return
        for number, (state, name) in enumerate(zip(states, distinct_names([s.run for s in states]), strict=True)):
            if state.state == "running" and state.step == state.steps:
                continue  # its line comes when it is done, with the last accuracy
            part = LINES_PER_RUN * state.step // max(1, state.steps)
            if self.shown.get(state.run) != (state.state, part):
                self.shown[state.run] = (state.state, part)
                self._line(f"{number}: {name}", state)

    def _line(self, name: str, state: RunState) -> None:
        facts = f"{name}: {state.state}"
        if state.state == "running" or state.step:
            facts += f" {state.step}/{state.steps}"
        if state.accuracy is not None:
            facts += f"  held-out accuracy {state.accuracy:.3f}"
        if state.error:
            facts += f": {state.error}"
        self.console.print(facts)
