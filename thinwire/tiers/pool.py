"""Memory for what is on its way between a disk and the processor: slots of one size, taken once and used again."""

from __future__ import annotations

import mmap
from queue import SimpleQueue

import torch
from torch import Tensor

# O_DIRECT wants addresses, lengths and offsets that are multiples of a disk's block.
BLOCK_BYTES = 4096


def aligned(num_bytes: int) -> int:
    """The next multiple of a block."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pages(num_bytes: int) -> Tensor:
    """Zeros, uint8 [num_bytes], that begin with a page and go back to the system when nobody holds them."""
    # Private, or the kernel would not count them as data of this process.
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class Pool:
    """So many slots of `slot_bytes` each, uint8; whoever takes one when none is free waits."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = aligned(slot_bytes)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self.num_slots = 0
        self.add(num_slots)

    def add(self, num_slots: int) -> None:
        """Make room for more."""
        self.num_slots += num_slots
        for _ in range(num_slots):
            self._free.put(pages(self.slot_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def take(self) -> Tensor:
        return self._free.get()

    def give_back(self, slot: Tensor) -> None:
        self._free.put(slot)
