"""Memory for transfers between disk and processor: slots of one size, allocated once and reused."""

from __future__ import annotations

import mmap
from queue import SimpleQueue

import torch
from torch import Tensor

# O_DIRECT wants addresses, lengths and offsets that are multiples of a disk's block.
BLOCK_BYTES = 4096


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of a block."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pages(num_bytes: int) -> Tensor:
    """Zeros, uint8 [num_bytes], aligned to a page. The memory returns to the system when no tensor uses it."""
    # Private, or the kernel would not count them as data of this process.
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class Pool:
    """Slots of `slot_bytes` each, uint8. Taking a slot waits until one is free."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = aligned(slot_bytes)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self.num_slots = 0
        self.add(num_slots)

    def add(self, num_slots: int) -> None:
        """Add slots."""
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
