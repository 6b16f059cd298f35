"""Moves tensors of any length and address between memory and a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, uint8

from thinwire.errors import ThinwireError
from thinwire.tiers.checksum import crc32
from thinwire.tiers.file import DiskFile
from thinwire.tiers.pool import BLOCK_BYTES, aligned, pages

# Bytes that pass at once.
CHUNK_BYTES = 4 << 20


class ChunkedFile:
    """A file that contiguous tensors pass to and from through memory of one chunk. For one thread at a time.

    The tensors' own memory is not shown to the disk: it need not be aligned, and it can be freed afterwards.
    """

    def __init__(self, file: DiskFile) -> None:
        self.file, self._memory = file, pages(CHUNK_BYTES + BLOCK_BYTES)

    def write(self, place: int, tensor: Tensor, known: Sequence[int] = ()) -> list[int]:
        """Write a tensor from byte `place` on. Return a checksum of each of its chunks.

        known: what an earlier `write` of the tensor to this place returned. Chunks that are unchanged are not written.
        """
        sums = list[int]()
        for number, (start, part, space) in enumerate(self._chunks(tensor)):
            sums.append(_sum_of(part, space))
            if known[number : number + 1] != sums[-1:]:
                self.file.write(place + start, space)
        return sums

    def is_same(self, tensor: Tensor, sums: Sequence[int]) -> bool:
        """Whether `write` would return these checksums."""
        return sums == [_sum_of(part, space) for _, part, space in self._chunks(tensor)]

    def read(self, place: int, tensor: Tensor, sums: Sequence[int], what: str) -> None:
        """Fill a tensor from byte `place` on.

        Args:
            sums: what `write` returned.
            what: the tensor's name in an error.

        Raises ThinwireError if the bytes are not those that were written.
        """
        for (start, part, space), expected in zip(self._chunks(tensor), sums, strict=True):
            self.file.read(place + start, space)
            self._check(space, expected, what)
            part.copy_(space[: len(part)])

    def sums(self, tensor: Tensor) -> list[int]:
        """Checksums of a part of a tensor, with which `read_part` reads it alone."""
        found = list[int]()
        for _, part, space in self._chunks(tensor):
            found.append(crc32(space[: len(part)].copy_(part)))
        return found

    def read_part(self, place: int, part: Tensor, sums: Sequence[int], what: str) -> None:
        """Fill a part of a tensor from byte `place` on, which need not be the first one of a block.

        Args:
            sums: what `sums` returned.
            what: the tensor's name in an error.

        Raises ThinwireError if the bytes are not those that were written.
        """
        for (start, octets, _), expected in zip(self._chunks(part), sums, strict=True):
            before = (place + start) % BLOCK_BYTES
            space = self._memory[: aligned(before + len(octets))]
            self.file.read(place + start - before, space)
            self._check(octets.copy_(space[before : before + len(octets)]), expected, what)

    def _check(self, octets: Tensor, expected: int, what: str) -> None:
        if crc32(octets) != expected:
            raise ThinwireError(f"store {self.file.folder}: {what} not what was written: the disk is damaged")

    def _chunks(self, tensor: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (first byte, these bytes of a tensor, memory for whole blocks of them)."""
        octets = tensor.detach().view(-1).view(uint8)
        for start in range(0, len(octets), CHUNK_BYTES):
            part = octets[start : start + CHUNK_BYTES]
            yield start, part, self._memory[: aligned(len(part))]


def _sum_of(part: Tensor, space: Tensor) -> int:
    """Copy a part to memory for whole blocks, the rest of which is zero, and return the checksum of these."""
    space[: len(part)], space[len(part) :] = part, 0
    return crc32(space)
