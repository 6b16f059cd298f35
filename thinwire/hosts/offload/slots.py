"""Tensors on a disk: in one slot, or in two, so that what was kept can be read while the next step is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thinwire.tiers import ChunkedFile, DiskFile, Pace, TierMeter


@dataclass(eq=False)
class StoredTensor:
    """A tensor with a place on the disk.

    Attributes:
        place: its first byte in each slot.
        slot: where it was last written.
        sums: of each slot, the checksums of what was written of it.
    """

    tensor: Tensor
    place: int
    slot: int = 0
    sums: list[list[int]] = field(default_factory=lambda: [[], []])


def target_of(kept: int | None) -> int:
    """The slot that may be written. kept: the one that must stay as it is; None: neither must."""
    return 0 if kept is None else 1 - kept


class SlottedFile:
    """A file of one slot of `num_bytes`, or, with a name, of two. With a name it stays when the process ends.

    Raises ConfigError if the folder has not enough space.
    """

    def __init__(self, folder: Path, num_bytes: int, meter: TierMeter, pace: Pace, name: str = "") -> None:
        self.slot_bytes = num_bytes
        self.file = DiskFile(folder, (2 if name else 1) * num_bytes, meter, pace, name)
        self._inwards, self._outwards = ChunkedFile(self.file), ChunkedFile(self.file)

    def at(self, place: int, slot: int) -> int:
        """Where byte `place` of a slot lies in the file."""
        return place + slot * self.slot_bytes

    def read(self, stored: StoredTensor, what: str) -> None:
        """Fill a tensor from the disk; one thread at a time. what: see ChunkedFile.read."""
        self._inwards.read(self.at(stored.place, stored.slot), stored.tensor, stored.sums[stored.slot], what)

    def write(self, stored: StoredTensor, kept: int | None) -> None:
        """Write what has changed of a tensor; one thread at a time. kept: see `target_of`."""
        slot = target_of(kept)
        if slot != stored.slot and self._outwards.is_same(stored.tensor, stored.sums[stored.slot]):
            return
        stored.sums[slot] = self._outwards.write(self.at(stored.place, slot), stored.tensor, stored.sums[slot])
        stored.slot = slot

    def write_plain(self, place: int, tensor: Tensor) -> None:
        """Write a tensor that is never kept to the first slot; one thread at a time."""
        self._outwards.write(place, tensor)

    def mapped(self, tensor: Tensor, place: int, slot: int = 0) -> Tensor:
        """A stored tensor as a view of the file."""
        if not tensor.numel():
            return tensor
        found: Tensor = self.file.mapped(self.at(place, slot), tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return found


def hollow(shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    found = torch.empty(shape, dtype=dtype)
    found.untyped_storage().resize_(0)
    return found
