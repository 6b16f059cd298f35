"""Rows of a matrix in a file that bypasses the page cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.tiers.file import DiskFile
from thinwire.tiers.pool import BLOCK_BYTES, aligned, pages
from thinwire.tiers.rows import RowStore, canary, sums_of

# Bytes that are read at once; two such parts are in memory.
STAGING_BYTES = 1 << 20


class DiskRows(RowStore):
    """A matrix in a file, from byte `place` on, whose checksums are in memory. The canary lies behind the file's end.

    Rows are read in runs of whole blocks: those whose blocks touch are read together. While one run is copied, the next
    one is read.
    """

    def __init__(
        self, file: DiskFile, place: int, num_rows: int, width: int, dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(num_rows, width, dtype, device)
        self.file, self.place = file, place
        self._noted = torch.zeros(num_rows, dtype=torch.int64)
        self._canary_place = file.num_bytes
        file.grow(file.num_bytes + self.row_bytes)
        self._canary = pages(aligned(self.row_bytes))
        self._canary[: self.row_bytes] = canary(self.row_bytes)
        file.write(self._canary_place, self._canary)
        self._staging = [pages(max(STAGING_BYTES, aligned(self.row_bytes) + BLOCK_BYTES)) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-rows")

    @property
    def name(self) -> str:
        return f"store {self.file.folder}"

    @property
    def staging_bytes(self) -> int:
        """Bytes of memory that rows pass through."""
        return sum(map(len, self._staging))

    def note(self, values: Tensor) -> None:
        """Take the checksums of all rows from the values that were written, [num_rows, width]."""
        self._noted = sums_of(values)

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown()

    def _sums(self, wanted: Tensor) -> Tensor:
        return self._noted[wanted]

    def _fetch(self, wanted: Tensor) -> Tensor:
        found = torch.empty(len(wanted), self.width, dtype=self.dtype)
        reads = list(self._runs(wanted))
        coming = self._reader.submit(self._read, wanted, reads[0], 0) if reads else None
        for number, (first, end) in enumerate(reads):
            assert coming is not None
            rows = coming.result()
            if number + 1 < len(reads):
                coming = self._reader.submit(self._read, wanted, reads[number + 1], (number + 1) % 2)
            torch.index_select(rows, 0, wanted[first:end] - wanted[first], out=found[first:end])
        self.file.read(self._canary_place, self._canary)
        self._check_canary(self._canary[: self.row_bytes])
        return found

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
