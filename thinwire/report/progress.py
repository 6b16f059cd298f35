"""The output of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.table import Table

from thinwire.report.metrics import StepMetrics
from thinwire.report.units import bytes_text
from thinwire.table import Row

LINE_EVERY_S = 5.0
NUM_ROWS = 10
NUM_TIMED = 20


class Progress:
    """Shows steps as they happen.

    num_steps: of the whole run. uncompressed_bytes: of one step, in fp32. sender: whose bytes are shown if ranks send
    different amounts; empty: each rank's. whole: those bytes are of ranks that average gradients of whole models, and
    not of these ranks, which share the work.
    """

    def __init__(
        self, num_steps: int, tokens_per_step: int, uncompressed_bytes: float, sender: str = "", *, whole: bool = False
    ) -> None:
        self.sent_by = f"sent by {sender}" if sender else "sent"
        self.whole = "whole models in " if whole else ""
        self.num_steps = num_steps
        self.tokens_per_step = tokens_per_step
        self.uncompressed_bytes = uncompressed_bytes
        self.console = Console(highlight=False, markup=False, soft_wrap=True)
        self._recent: deque[StepMetrics] = deque(maxlen=NUM_TIMED)
        self._rows: deque[list[str]] = deque(maxlen=NUM_ROWS)
        self._line_due = 0.0
        self._live: Live | None = None

    def start_table(self, rows: Sequence[Row]) -> None:
        """Print what was asked for, what is in effect, and why."""
        if not self.console.is_terminal:
            for asked, effect, why in rows:
                self.say(f"{asked}: {effect}" + (f" ({why})" if why else ""))
            return
        table = Table("asked for", "in effect", "why", title="start", title_justify="left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table, soft_wrap=False)

    def step(self, record: StepMetrics) -> None:
        """Show one step: every one in the live table, one every few seconds as a plain line."""
        self._recent.append(record)
        if self.console.is_terminal:
            self._show_live(record)
        elif record.step == self.num_steps or time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            names = ("step", "loss", "tokens/s", self.sent_by, "waiting", "left")
            pairs = zip(names, self._cells(record), strict=True)
            self.console.print("  ".join(f"{name} {cell}" for name, cell in pairs))

    def say(self, message: str) -> None:
        """Print a line of text, above the live table if there is one."""
        self.console.print(message)

    def warn(self, message: str) -> None:
        """Print a line that must not be missed."""
        self.console.print(f"WARNING: {message}", style="bold red")

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _cells(self, record: StepMetrics) -> list[str]:
        typical_s = median(recent.step_s for recent in self._recent)
        left = timedelta(seconds=round((self.num_steps - record.step) * typical_s))
        return [
            f"{record.step}/{self.num_steps}",
            f"{record.loss:.4f}",
            f"{self.tokens_per_step / typical_s:,.0f}",
            f"{bytes_text(record.sent_bytes)}, {self.whole}fp32 {bytes_text(self.uncompressed_bytes)}",
            f"{record.exposed_comm_s:.3f} of {record.step_s:.3f} s",
            str(left),
        ]

    def _show_live(self, record: StepMetrics) -> None:
        self._rows.append(self._cells(record))
        table = Table(
            "step",
            "loss",
            "tokens/s",
            f"{self.sent_by}, and {self.whole or 'in '}fp32",
            "waiting for communication",
            "time left",
        )
        for row in self._rows:
            table.add_row(*row)
        if self._live is None:
            self._live = Live(table, console=self.console, refresh_per_second=4)
            self._live.start()
        self._live.update(table)
