"""Follows a run by its metrics file, and counts the kernel's bytes between its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from thinwire.compare.checks import WARM_UP_STEPS
from thinwire.compare.record import Leg
from thinwire.lab import Counters, LabNetwork

# Of the counters at the end of one step, on a machine that is slower than the steps.
MOST_READINGS = 5


class MetricsTail:
    """New lines of a metrics file, whether lines are appended or the file is written again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = set(path.read_bytes().splitlines()) if path.exists() else set()
        self._offset = self._inode = 0

    def new_rows(self) -> list[dict[str, Any]]:
        """Complete lines since the last call that are steps. Costs one stat if nothing has changed."""
        try:
            stat = self.path.stat()
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode, self._offset = stat.st_ino, 0
            if stat.st_size == self._offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self._offset)
                complete = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(complete) + 1 if complete else 0
        lines = [line for line in complete.splitlines() if line not in self._old]
        self._old.update(lines)
        return [row for row in map(_row, lines) if row]


def _row(line: bytes) -> dict[str, Any]:
    """A line of metrics; empty if it is something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and type(row.get("step")) is int else {}


class LegWatch:
    """Turns the steps of one start into a Leg: the timed steps, and the links' bytes during them.

    timed_steps: number of steps to time after the warm-up; None: all. Before the warm-up and after them the links'
        rates are lifted.
    settled_after: the warm-up lasts at least until this step of the run.
    """

    def __init__(
        self, network: LabNetwork, tail: MetricsTail, turn: int, timed_steps: int | None, settled_after: int = 0
    ) -> None:
        self.leg = Leg(turn)
        self.last_row: dict[str, Any] = {}
        self._network, self._tail, self._timed_steps = network, tail, timed_steps
        self._settled_after = settled_after
        self._from: tuple[int, list[Counters]] | None = None
        self._is_timing = self._is_shaped = True

    def look(self) -> bool:
        """Whether a step has finished since the last call."""
        rows = self._tail.new_rows()
        if not rows:
            return False
        self.leg.first_step = self.leg.first_step or rows[0]["step"]
        self._note(rows)
        if self._is_timing and self._timed_steps is not None:
            self._shape_from_warm_up()
        if self._is_timing and self.leg.last_step >= self._last_warm:
            self._count()
        return True

    def _shape_from_warm_up(self) -> None:
        """Lift the rates in a method's first steps, in which it is not yet what the race times."""
        is_shaped = self.leg.last_step >= self._last_warm - WARM_UP_STEPS
        if is_shaped and not self._is_shaped:
            # Steps may have ended before they were seen.
            self._settled_after = max(self._settled_after, self.leg.last_step + WARM_UP_STEPS)
        if is_shaped != self._is_shaped:
            self._is_shaped = is_shaped
            self._network.shape(is_shaped)

    @property
    def _last_warm(self) -> int:
        return max(self.leg.first_step + WARM_UP_STEPS - 1, self._settled_after)

    def _note(self, rows: list[dict[str, Any]]) -> None:
        self.leg.last_step, self.last_row = rows[-1]["step"], rows[-1]

    def _count(self) -> None:
        """Read the links' counters at the end of a step, and lift the rates after the last timed one."""
        leg, counters = self.leg, self._network.counters()
        for _ in range(MOST_READINGS):
            # A step that has ended while they were read has sent some of what they count.
            if not (rows := self._tail.new_rows()):
                break
            self._note(rows)
            counters = self._network.counters()
        if self._from is None:
            self._from = leg.last_step, counters
        if leg.last_step > self._last_warm:
            leg.first_timed, leg.last_timed = self._last_warm + 1, leg.last_step
        moved = [now - before for now, before in zip(counters, self._from[1], strict=True)]
        leg.kernel_steps = leg.last_step - self._from[0]
        leg.kernel_sent_bytes = [node.sent_bytes for node in moved]
        leg.kernel_received_bytes = [node.received_bytes for node in moved]
        if self._timed_steps is not None and leg.last_step >= self._last_warm + self._timed_steps:
            leg.last_timed = self._last_warm + self._timed_steps
            self._is_timing = False
            self._network.shape(False)
