"""How much memory of a budget is left, by what the process has held at most."""

from __future__ import annotations

import resource
from pathlib import Path

STATM = Path("/proc/self/statm")


def data_bytes() -> int:
    """What counts against the limit of this process's data, RLIMIT_DATA: private memory, touched or not."""
    return int(STATM.read_text().split()[5]) * resource.getpagesize()


class Room:
    """The room in a budget; `look` is called where a step holds most."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes, self.peak_bytes = memory_bytes, 0

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, data_bytes())

    @property
    def left_bytes(self) -> int:
        """Of the budget; 0 where there is none."""
        return max(0, self.memory_bytes - self.peak_bytes) if self.memory_bytes is not None else 0
