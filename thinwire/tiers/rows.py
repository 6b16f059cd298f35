"""Rows of a matrix that does not lie in this process's memory, of which only those that are asked for are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.errors import ConfigError, ThinwireError

# What is looked at a time for a checksum.
PART_BYTES = 1 << 20
# Any odd number, so that words in another place give another sum.
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class RowStore(ABC):
    """A matrix [num_rows, width] of which single rows are read. Each row has a checksum.

    A row of a known pattern, the canary, lies beside the others. It is read with every gather, in the same way.

    `rows[idx]` has the shape that `matrix[idx]` would have. An index with dimensions says where the result lies: on its
    device. A number, a slice, a tensor without dimensions on the CPU, and a store of numbers don't: the result lies on
    `device`, which computes.

    Args:
        device: where results lie for which no index says it.

    Source: PyTorch-Direct (Min et al., VLDB 2021), whose rows lie in a host's memory.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.num_rows, self.width, self.dtype, self.device = num_rows, width, dtype, torch.device(device)
        self.row_bytes = width * dtype.itemsize

    def __len__(self) -> int:
        return self.num_rows

    @property
    @abstractmethod
    def name(self) -> str:
        """What an error calls the store."""

    @abstractmethod
    def _fetch(self, wanted: Tensor) -> Tensor:
        """Copies of rows, [n, width] on the CPU. wanted: int64 [n], ascending, no number twice.

        Checks the canary too.
        """

    @abstractmethod
    def _sums(self, wanted: Tensor) -> Tensor:
        """The checksums that these rows must have, int64 [n]."""

    def _check_canary(self, found: Tensor) -> None:
        """Raise ThinwireError if these bytes, read where the canary lies, are others: uint8 [row_bytes]."""
        if not torch.equal(found, canary(self.row_bytes)):
            raise ThinwireError(f"{self.name}: the canary row is not what was written: the disk returns other bytes")

    def __getitem__(self, idx: int | slice | Sequence[int] | Tensor | RowStore) -> Tensor:
        """The rows that `matrix[idx]` would have, on the device that the class names. Raises as `gather` does."""
        if isinstance(idx, RowStore):
            numbers = idx[:].to("cpu", torch.int64)
            return self._gathered(numbers.squeeze(-1), self.device)
        if isinstance(idx, slice):
            return self._gathered(torch.arange(self.num_rows)[idx], self.device)
        try:
            if isinstance(idx, tuple):
                raise TypeError
            idx = torch.as_tensor(idx)
        except (TypeError, ValueError, RuntimeError):
            raise IndexError(
                f"{self.name}: {idx!r} names no rows; nearest: rows[:], or a number, a slice, or a list or tensor"
            ) from None
        if idx.dtype == torch.bool:
            if idx.shape != (self.num_rows,):
                raise IndexError(f"{self.name}: a mask of shape {list(idx.shape)} for {self.num_rows} rows")
            idx = idx.nonzero().view(-1)
        if idx.is_floating_point():
            if idx.numel():
                raise IndexError(f"{self.name}: rows have whole numbers, and an index is {idx.dtype}")
            idx = idx.long()
        if not idx.is_meta and (beyond := idx[idx < -self.num_rows]).numel():
            raise IndexError(f"{self.name}: row {int(beyond[0])} of {self.num_rows}")
        return self.gather(torch.where(idx < 0, idx + self.num_rows, idx))

    def gather(self, idx: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows of these numbers, [*idx.shape, width]; each row is read once.

        Args:
            idx: whole numbers from 0 on, of any shape. On the device "meta" they stand for any numbers, and so do the
                rows.
            out: the tensor to fill; by default a new one, where the class says.

        Raises IndexError for a number out of range, ConfigError for another shape or dtype of `out`,
        ThinwireError for rows that are not what was written.
        """
        shape = (*idx.shape, self.width)
        if out is not None and (tuple(out.shape), out.dtype) != (shape, self.dtype):
            raise ConfigError(
                f"{self.name}: out is {list(out.shape)} in {out.dtype}; it must be {list(shape)} in {self.dtype}"
            )
        place = idx.device if idx.dim() or idx.device.type != "cpu" else self.device
        if idx.is_meta:
            found = torch.empty(shape, dtype=self.dtype, device=place)
        else:
            found = self._gathered(idx.cpu(), place)
        return found if out is None else out.copy_(found)

    def _gathered(self, idx: Tensor, place: torch.device) -> Tensor:
        wanted, inverse = idx.reshape(-1).unique(return_inverse=True)
        if wanted.numel() and not (wanted[0] >= 0 and wanted[-1] < self.num_rows):
            raise IndexError(f"{self.name}: row {int(wanted[0 if wanted[0] < 0 else -1])} of {self.num_rows}")
        found = self._fetch(wanted)
        wrong = wanted[sums_of(found) != self._sums(wanted)]
        if wrong.numel():
            listed = ", ".join(map(str, wrong[:3].tolist())) + (" and more" if len(wrong) > 3 else "")
            raise ThinwireError(f"{self.name}: row {listed} not what was written: the disk is damaged")
        return found[inverse].view(*idx.shape, self.width).to(place)


def canary(num_bytes: int) -> Tensor:
    """A pattern that neither zeros nor another row is likely to be, uint8 [num_bytes]."""
    return ((torch.arange(num_bytes) * 151 + 89) % 251 + 1).to(torch.uint8)


def sums_of(rows: Tensor) -> Tensor:
    """A checksum of each row [n, width]: int64 [n]."""
    found = torch.empty(len(rows), dtype=torch.int64)
    words = rows.contiguous().view(torch.uint8)
    words = words.view(torch.int32) if words.shape[1] % 4 == 0 else words
    factors = torch.arange(1, 2 * words.shape[1], 2) * FACTOR
    step = max(1, PART_BYTES // (8 * words.shape[1]))
    for first in range(0, len(rows), step):
        found[first : first + step] = (words[first : first + step] * factors).sum(1)
    return found
