"""Terminal output of a race: the contestants, the progress, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from thinwire.compare.measure import Result
from thinwire.compare.plan import RacePlan
from thinwire.report.race import FIGURES, figure_text, notes, ratio_text, sentences, shown_figures, spread_text
from thinwire.report.run import number
from thinwire.report.units import seconds_text

LINE_EVERY_S = 10.0
# Width of the table if the output is not a terminal.
PLAIN_WIDTH = 160


class Board:
    """Shows the progress of a race: a live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False)
        if not self.console.is_terminal:
            self.console.width = max(PLAIN_WIDTH, self.console.width)
        self._live: Live | None = None
        self._states: dict[str, list[str]] = {}
        self._current = ""
        self._num_legs = self._num_done = self._num_steps = self._turn = 0
        self._stops: tuple[int, ...] = ()
        # The part of the turn under way that is done.
        self._share = 0.0
        self._began = self._line_due = time.monotonic()

    def start(self, plan: RacePlan, num_legs: int) -> None:
        """Print what is in effect. num_legs: number of remaining starts."""
        self._num_legs, self._began = num_legs, time.monotonic()
        self._stops = plan.stops
        table = Table("asked for", "in effect", "why", title=f"race in {plan.lab}", title_justify="left")
        for row in plan.rows:
            table.add_row(*row)
        self.console.print(table)

    def leg(self, name: str, seed: int, turn: int, num_steps: int) -> None:
        """Note that a contestant starts. num_steps: steps of its whole run."""
        self._current, self._num_steps, self._turn, self._share = name, num_steps, turn, 0.0
        self._states[name] = [name, str(seed), f"{turn}/{len(self._stops)}", "starts", "", ""]
        self._show(is_due=False)

    def step(self, row: dict[str, Any]) -> None:
        """Note that the running contestant has finished a step."""
        loss, step_s = number(row.get("loss")), number(row.get("step_s"))
        first, last = 0, self._num_steps
        if self._num_steps == self._stops[-1]:
            first, last = [0, *self._stops][self._turn - 1 : self._turn + 1]
        self._share = min(max((row["step"] - first) / max(last - first, 1), 0.0), 1.0)
        step = f"{row['step']}/{self._num_steps}"
        self._states[self._current][3:] = [step, f"{loss:.4f}", seconds_text(step_s)]
        self._show(is_due=time.monotonic() >= self._line_due)

    def leg_done(self, failed: str) -> None:
        """Note that the running contestant has ended. failed: why it is out of the race."""
        self._num_done, self._share = self._num_done + 1, 0.0
        self._show(is_due=not failed)
        if failed:
            self.console.print(f"{self._current} is out of the race: {failed}", style="bold red")

    def leg_skipped(self) -> None:
        """Note that the turn of a contestant that is out of the race is skipped."""
        self._num_legs -= 1

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(self, result: Result, page: Path) -> None:
        """Print the result and the place of its files."""
        values = result.to_json()
        self.console.print(result_table(values))
        reasons = [f"{row.name} {row.status}: {row.reason}" for row in result.contestants if row.reason]
        for line in (*reasons, *sentences(values, page.parent), *notes(values)):
            self.console.print(line, soft_wrap=True)
        if result.stopped:
            self.console.print(f"stopped by {result.stopped}; the same command with --resume goes on")
        self.console.print(f"report: {page}", soft_wrap=True)

    @property
    def _left(self) -> str:
        if not self._num_done:
            return f"turn 1 of {self._num_legs}; the time left is known after it"
        done = self._num_done + self._share
        left = timedelta(seconds=round((time.monotonic() - self._began) * (self._num_legs - done) / done))
        return f"{self._num_done} of {self._num_legs} turns done, about {left} left"

    def _show(self, is_due: bool) -> None:
        if self.console.is_terminal:
            table = Table("contestant", "seed", "round", "step", "loss", "s/step", caption=self._left)
            for name, state in self._states.items():
                table.add_row(*state, style="bold" if name == self._current else "")
            if self._live is None:
                self._live = Live(table, console=self.console, refresh_per_second=4)
                self._live.start()
            self._live.update(table)
        elif is_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            name, seed, turn, step, loss, step_s = self._states[self._current]
            done = f"step {step}  loss {loss}  {step_s} a step" if step_s else step
            self.console.print(f"{name}  seed {seed}  round {turn}  {done}  ({self._left})")


def result_table(values: Mapping[str, Any]) -> Table:
    """One row per contestant; below each figure its ratio to the reference's, and its spread."""
    table = Table("contestant", title="result", title_justify="left", show_lines=True)
    shown = shown_figures(FIGURES, values["contestants"])
    for name in shown:
        table.add_column(FIGURES[name], justify="right")
    for row in values["contestants"]:
        state = ["in one piece"] * row["is_whole"] + [row["status"]] * (row["status"] != "finished")
        cells = (
            [figure_text(name, row), ratio_text(name, row, values["reference"]), spread_text(name, row)]
            for name in shown
        )
        table.add_row("\n".join([row["name"], *state]), *("\n".join(filter(None, cell)) for cell in cells))
    return table
