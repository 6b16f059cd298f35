"""Rows of a matrix in a file that is mapped into memory: processes of one machine share its pages."""

from __future__ import annotations

import json
import mmap
import os
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers.pool import BLOCK_BYTES
from thinwire.tiers.rows import RowStore, canary, sums_of

KIND = "thinwire rows 1"
SUM_BYTES = 8


class MappedRows(RowStore):
    """A matrix in a file that `create` wrote. The kernel loads a page when a row of it is first read, once for all
    processes that map the file, and drops it when memory is short.

    The canary lies behind the last row: so reads that return other bytes, and writes past the end, are found. The head
    and the checksums have checksums too.

    Args:
        path: the file.
        device: see RowStore.
        writable: `put` may change rows. Rows must not be read meanwhile.

    Raises ConfigError for a file that `create` did not write, ThinwireError for one that is damaged.
    """

    def __init__(self, path: str | Path, *, device: torch.device | str = "cpu", writable: bool = False) -> None:
        self.path, self.writable = Path(path), writable
        self._head = head = self._read_head()
        super().__init__(head["num_rows"], head["width"], getattr(torch, head["dtype"]), device)
        self._memory = self._mapped(_sums_place(self.num_rows, self.row_bytes) + SUM_BYTES * self.num_rows)
        num_bytes = (self.num_rows + 1) * self.row_bytes
        self._rows = self._memory[BLOCK_BYTES : BLOCK_BYTES + num_bytes].view(self.dtype).view(-1, self.width)
        self._stored = self._memory[_sums_place(self.num_rows, self.row_bytes) :].view(torch.int64)
        if not writable and zlib.crc32(self._stored.numpy().data) != head["sums"]:
            raise ThinwireError(f"{self.name}: the checksums of its rows were overwritten: the file is damaged")
        self._fetch(torch.zeros(0, dtype=torch.int64))

    @classmethod
    def create(cls, path: str | Path, parts: Iterable[Tensor]) -> MappedRows:
        """Write a file, which is complete or absent, and open it.

        parts: rows [n, width] of one width and dtype, on the CPU, at least one row in all; one part is in memory at a
        time. Raises ConfigError for other parts, and for a disk without room.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                _write(file, parts, f"rows {path}")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"rows {path}: can't be written: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return cls(path)

    @property
    def name(self) -> str:
        return f"rows {self.path}"

    def put(self, first: int, values: Tensor) -> None:
        """Overwrite rows from number `first` on, [n, width]. Raises ConfigError unless the store is writable."""
        if not self.writable:
            raise ConfigError(f"{self.name}: opened to be read; nearest: MappedRows(path, writable=True)")
        end = first + len(values)
        if not 0 <= first <= end <= self.num_rows:
            raise IndexError(f"{self.name}: rows {first} to {end - 1} of {self.num_rows}")
        self._rows[first:end] = values.detach()
        self._stored[first:end] = sums_of(self._rows[first:end])
        # For whoever opens the file next.
        self._head["sums"] = zlib.crc32(self._stored.numpy().data)
        packed = bytearray(_packed(self._head))
        self._memory[:BLOCK_BYTES].zero_()[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8)

    def _fetch(self, wanted: Tensor) -> Tensor:
        found = self._rows.index_select(0, torch.cat([wanted, torch.tensor([self.num_rows])]))
        if not torch.equal(found[-1].view(torch.uint8), canary(self.row_bytes)):
            raise ThinwireError(
                f"{self.name}: what lies behind row {self.num_rows - 1}, the last, is not what was written there: a "
                "write past the end, or a damaged file"
            )
        return found[:-1]

    def _sums(self, wanted: Tensor) -> Tensor:
        return self._stored[wanted]

    def _read_head(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                text = file.read(BLOCK_BYTES).rstrip(b"\0")
        except OSError as error:
            raise ConfigError(f"{self.name}: can't be read: {error.strerror}") from error
        if not text.startswith(json.dumps(KIND).encode()):
            raise ConfigError(f"{self.name}: MappedRows.create did not write this file, or its head was overwritten")
        _, head, found = (*text.split(b"\n"), b"", b"")[:3]
        if str(zlib.crc32(head)).encode() != found:
            raise ThinwireError(f"{self.name}: its head was overwritten: the file is damaged")
        return json.loads(head)

    def _mapped(self, num_bytes: int) -> Tensor:
        """The file's bytes, as a view that the processes of a machine share."""
        size = self.path.stat().st_size
        if size != num_bytes:
            raise ThinwireError(f"{self.name}: has {size} bytes, and its head promises {num_bytes}: it was cut or grew")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        with self.path.open("r+b" if self.writable else "rb") as file:
            memory = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED, prot=protection)
        with warnings.catch_warnings():
            # That nobody may write to it.
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(memory, dtype=torch.uint8)


def _write(file: BinaryIO, parts: Iterable[Tensor], name: str) -> None:
    """Write rows, the canary, and their checksums; the head last."""
    sums, width, dtype = list[Tensor](), 0, torch.float32
    file.write(bytes(BLOCK_BYTES))
    for part in parts:
        if part.dim() != 2 or (sums and (part.shape[1], part.dtype) != (width, dtype)):
            raise ConfigError(f"{name}: all parts must be [rows, width] of one width and dtype")
        width, dtype = part.shape[1], part.dtype
        file.write(part.detach().contiguous().view(torch.uint8).numpy().data)
        sums.append(sums_of(part.detach()))
    num_rows, row_bytes = sum(map(len, sums)), width * dtype.itemsize
    if not num_rows * row_bytes:
        raise ConfigError(f"{name}: there must be at least one row of one element")
    file.write(canary(row_bytes).numpy().data)
    file.write(bytes(_sums_place(num_rows, row_bytes) - file.tell()))
    stored = torch.cat(sums).numpy().data
    file.write(stored)
    kind = str(dtype).removeprefix("torch.")
    file.seek(0)
    file.write(_packed({"num_rows": num_rows, "width": width, "dtype": kind, "sums": zlib.crc32(stored)}))


def _sums_place(num_rows: int, row_bytes: int) -> int:
    """Where the checksums begin, behind the canary."""
    return BLOCK_BYTES + -(-(num_rows + 1) * row_bytes // SUM_BYTES) * SUM_BYTES


def _packed(head: dict[str, Any]) -> bytes:
    text = json.dumps(head).encode()
    return json.dumps(KIND).encode() + b"\n" + text + b"\n" + str(zlib.crc32(text)).encode()
