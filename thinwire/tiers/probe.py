"""Measures how fast a folder's disk reads and writes, in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from thinwire.tiers.file import DiskFile, Pace, TierMeter
from thinwire.tiers.pool import pages

# Each transfer is twice as long as the one before, until they have taken so many seconds, or the longest one is done.
PROBE_S, FIRST_BYTES, LAST_BYTES = 0.05, 1 << 16, 1 << 22


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second of reading and of writing, past the page cache, in a file without a name.

    Of the longest transfer, because a short one tells of the delay. Each direction takes at most about 3 PROBE_S, also
    on a slow disk. Raises ConfigError as `DiskFile` does.
    """
    file = DiskFile(folder, 2 * LAST_BYTES, TierMeter(), Pace())
    # A disk that compresses must not gain by it.
    memory = pages(LAST_BYTES)
    memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    try:
        # Written first, because what was never written is not read from the disk.
        written, read = (_rate(move, memory) for move in (file.write, file.read))
    finally:
        file.close()
    return read, written


def _rate(move: Callable[[int, Tensor], None], memory: Tensor) -> float:
    begin, size, place = time.perf_counter(), FIRST_BYTES, 0
    while True:
        start = time.perf_counter()
        move(place, memory[:size])
        end = time.perf_counter()
        if size == LAST_BYTES or end - begin > PROBE_S:
            return size / (end - start)
        place, size = place + size, 2 * size
