"""Rows that are put one by one, in a file without a name or in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.tiers.file import Pace, TierMeter, TierReading
from thinwire.tiers.mount import check_folder
from thinwire.tiers.rows import RowStore, canary, sums_of

# Of the rows there are, one of so many parts is room for those that come.
SPARE_PARTS = 8


class GrowingRows(RowStore):
    """A matrix that begins without rows. Rows that were not put are zeros. In a file, the canary lies before them.

    Args:
        folder: of the file, on a disk; its space is freed when the process ends. None: rows lie in memory.
        width, dtype: of the rows.
        meter: counts bytes and seconds of the disk. pace: limits them.
    """

    def __init__(
        self, folder: Path | None, width: int, dtype: torch.dtype, meter: TierMeter, pace: Pace | None = None
    ) -> None:
        super().__init__(0, width, dtype)
        self.folder, self.meter, self.pace, self._file = folder, meter, pace or Pace(), None
        self._noted = torch.zeros(0, dtype=torch.int64)
        self._held = torch.zeros(0, width, dtype=dtype)
        if folder is not None:
            check_folder(folder, 0)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            self._write(torch.tensor([-1]), canary(self.row_bytes).view(1, -1))

    @property
    def name(self) -> str:
        return "rows in memory" if self.folder is None else f"store {self.folder}"

    def reach(self, num_rows: int) -> None:
        """Let there be as many rows at least."""
        self.num_rows = max(self.num_rows, num_rows)
        if (more := self.num_rows - len(self._noted)) > 0:
            # A few more, so that a row is rarely moved.
            more += self.num_rows // SPARE_PARTS
            self._noted = torch.cat([self._noted, self._noted.new_zeros(more)])
            if self._file is None:
                self._held = torch.cat([self._held, self._held.new_zeros(more, self.width)])

    def put(self, numbers: Tensor, rows: Tensor) -> None:
        """Keep rows [n, width] under their numbers, int64 [n]. Raises ThinwireError if the disk fails."""
        if not numbers.numel():
            return
        self.reach(int(numbers.max()) + 1)
        self._noted[numbers] = sums_of(rows)
        if self._file is None:
            self._held[numbers] = rows
            return
        self._write(numbers, rows.contiguous().view(torch.uint8))

    def _write(self, numbers: Tensor, rows: Tensor) -> None:
        """Write rows, uint8 [n, row_bytes], to the file; the canary is number -1."""
        assert self._file is not None
        octets, start = rows.numpy(), time.monotonic()
        for number, content in zip(numbers.tolist(), octets, strict=True):
            try:
                if os.pwrite(self._file.fileno(), content.data, (1 + number) * self.row_bytes) < self.row_bytes:
                    raise OSError(28, "no space left")
            except OSError as error:
                raise ThinwireError(f"{self.name}: rows can't be written: {error.strerror}") from error
        self.pace.keep(octets.size, start)
        self.meter.add(TierReading(0, octets.size, 0.0, time.monotonic() - start))

    def values(self) -> Tensor:
        """All rows, [num_rows, width]; those of a file as a view that is only read, page by page."""
        if self._file is None or not self.num_rows:
            return self._held[: self.num_rows]
        num_bytes = (1 + self.num_rows) * self.row_bytes
        os.ftruncate(self._file.fileno(), max(num_bytes, os.fstat(self._file.fileno()).st_size))
        memory = mmap.mmap(self._file.fileno(), num_bytes, flags=mmap.MAP_SHARED)
        return torch.frombuffer(memory, dtype=self.dtype).view(-1, self.width)[1:]

    def close(self) -> None:
        """Free the disk space."""
        if self._file is not None:
            self._file.close()

    def _sums(self, wanted: Tensor) -> Tensor:
        return self._noted[wanted]

    def _fetch(self, wanted: Tensor) -> Tensor:
        if self._file is None:
            return self._held[wanted]
        found = torch.zeros(1 + len(wanted), self.width, dtype=self.dtype)
        octets, start = found.view(torch.uint8).numpy(), time.monotonic()
        for number, into in zip([-1, *wanted.tolist()], octets, strict=True):
            try:
                os.preadv(self._file.fileno(), [into.data], (1 + number) * self.row_bytes)
            except OSError as error:
                raise ThinwireError(f"{self.name}: rows can't be read: {error.strerror}") from error
        self.pace.keep(octets.size, start)
        self.meter.add(TierReading(octets.size, 0, time.monotonic() - start))
        self._check_canary(found[0].view(torch.uint8))
        return found[1:]
