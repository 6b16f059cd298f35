"""Rows of a matrix on a disk, of which only those that are asked for are read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.tiers.file import DiskFile
from thinwire.tiers.pool import BLOCK_BYTES, aligned, pages

# Bytes that are read at once; two such parts are in memory.
STAGING_BYTES = 1 << 20
# Any odd number, so that words in another place give another sum.
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class RowStore:
    """A matrix [num_rows, width] in a file, from byte `place` on. Each row has a checksum in memory.

    Rows are read in runs of whole blocks: those whose blocks touch are read together. While one run is copied, the next
    one is read.

    Source: PyTorch-Direct (Min et al., VLDB 2021), whose rows lie in a host's memory.
    """

    def __init__(self, file: DiskFile, place: int, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.file, self.place, self.num_rows, self.width, self.dtype = file, place, num_rows, width, dtype
        self.row_bytes = width * dtype.itemsize
        self._sums = torch.zeros(num_rows, dtype=torch.int64)
        self._staging = [pages(max(STAGING_BYTES, aligned(self.row_bytes) + BLOCK_BYTES)) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-rows")

    def note(self, values: Tensor) -> None:
        """Take the checksums of all rows from the values that were written, [num_rows, width]."""
        self._sums = sums_of(values)

    def gather(self, idx: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of these numbers, [*idx.shape, width], on the device of `idx`; each row is read once.

        out: the tensor to fill. Raises IndexError for a number out of range, ThinwireError for a row that is not what
        was written.
        """
        wanted, inverse = idx.reshape(-1).cpu().unique(return_inverse=True)
        if wanted.numel() and not (wanted[0] >= 0 and wanted[-1] < self.num_rows):
            raise IndexError(f"row {int(wanted[0 if wanted[0] < 0 else -1])} of {self.num_rows}")
        found = torch.empty(len(wanted), self.width, dtype=self.dtype)
        reads = list(self._runs(wanted))
        coming = self._reader.submit(self._read, wanted, reads[0], 0) if reads else None
        for number, (first, end) in enumerate(reads):
            assert coming is not None
            rows = coming.result()
            if number + 1 < len(reads):
                coming = self._reader.submit(self._read, wanted, reads[number + 1], (number + 1) % 2)
            torch.index_select(rows, 0, wanted[first:end] - wanted[first], out=found[first:end])
        if not torch.equal(sums_of(found), self._sums[wanted]):
            raise ThinwireError(f"store {self.file.folder}: rows are not what was written: the disk is damaged")
        result = found[inverse].view(*idx.shape, self.width).to(idx.device)
        return result if out is None else out.copy_(result)

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown()

    def _runs(self, wanted: Tensor) -> Iterator[tuple[int, int]]:
        """Yield [first, end) of the sorted numbers whose rows are read together."""
        starts = self.place + wanted * self.row_bytes
        ends = starts + self.row_bytes
        touching = starts[1:] // BLOCK_BYTES <= (ends[:-1] - 1) // BLOCK_BYTES + 1
        cuts = [0, *((~touching).nonzero().view(-1) + 1).tolist(), len(wanted)]
        most = len(self._staging[0]) - 2 * BLOCK_BYTES
        for first, end in pairwise(cuts if len(wanted) else []):
            while first < end:
                last = int(torch.searchsorted(ends[first:end], starts[first] + most, right=True))
                yield first, first + max(1, last)
                first += max(1, last)

    def _read(self, wanted: Tensor, run: tuple[int, int], turn: int) -> Tensor:
        """The rows from the first of a run to its last, [n, width], in the staging memory of this turn."""
        first, last = int(wanted[run[0]]), int(wanted[run[1] - 1])
        start = self.place + first * self.row_bytes
        begin = start // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = (last + 1 - first) * self.row_bytes
        memory = self._staging[turn][: aligned(start + num_bytes - begin)]
        self.file.read(begin, memory)
        return memory[start - begin : start - begin + num_bytes].view(self.dtype).view(-1, self.width)


def sums_of(rows: Tensor) -> Tensor:
    """A checksum of each row [n, width]: int64 [n]."""
    found = torch.empty(len(rows), dtype=torch.int64)
    words = rows.contiguous().view(torch.uint8)
    words = words.view(torch.int32) if words.shape[1] % 4 == 0 else words
    factors = torch.arange(1, 2 * words.shape[1], 2) * FACTOR
    step = max(1, STAGING_BYTES // (8 * words.shape[1]))
    for first in range(0, len(rows), step):
        found[first : first + step] = (words[first : first + step] * factors).sum(1)
    return found
