"""Rows that are read from a disk are those that were written, and little else is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire.errors import ThinwireError
from thinwire.tiers import BLOCK_BYTES, DiskFile, Pace, RowStore, TierMeter
from thinwire.tiers.pool import aligned, pages

ROWS = 700


def stored(folder: Path, values: torch.Tensor, place: int) -> RowStore:
    """A store of these rows, from byte `place` on."""
    octets = values.view(torch.uint8).view(-1)
    memory = pages(aligned(place + len(octets)))
    memory[place : place + len(octets)] = octets
    file = DiskFile(folder, len(memory), TierMeter(), Pace(None))
    file.write(0, memory)
    store = RowStore(file, place, len(values), values.shape[1], values.dtype)
    store.note(values)
    return store


@pytest.mark.parametrize(("width", "dtype"), [(100, torch.float32), (33, torch.bfloat16), (3000, torch.float32)])
def test_rows_are_those_of_the_matrix(tmp_path: Path, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, width, generator=generator).to(dtype)
    store, spread = stored(tmp_path, values, 12), torch.randint(0, ROWS, (4, 50), generator=generator)
    for idx in (torch.tensor([3, 3, ROWS - 1, 0]), torch.zeros(0, 2, dtype=torch.long), spread, torch.arange(ROWS)):
        before = store.file.meter.snapshot()
        assert torch.equal(store.gather(idx), values[idx])
        read = (store.file.meter.snapshot() - before).read_bytes
        distinct = len(idx.unique())
        assert distinct * store.row_bytes <= read <= distinct * (store.row_bytes + 3 * BLOCK_BYTES)
    out = torch.empty(2, width, dtype=dtype)
    assert store.gather(torch.tensor([5, 1]), out) is out and torch.equal(out, values[[5, 1]])
    # All rows together take few blocks more than they have.
    assert read <= ROWS * store.row_bytes * 1.02 + 2 * BLOCK_BYTES


def test_rows_that_are_not_there_or_are_damaged_are_refused(tmp_path: Path) -> None:
    values = torch.arange(4096.0).view(64, 64)
    store = stored(tmp_path, values, BLOCK_BYTES)
    for number in (-1, 64):
        with pytest.raises(IndexError, match=f"row {number} of 64"):
            store.gather(torch.tensor([3, number]))
    memory = pages(BLOCK_BYTES)
    store.file.read(BLOCK_BYTES, memory)
    # Two words of the second row change places.
    memory.view(torch.int32)[64:66] = memory.view(torch.int32)[64:66].flip(0)
    store.file.write(BLOCK_BYTES, memory)
    assert torch.equal(store.gather(torch.tensor([0, 2])), values[[0, 2]])
    with pytest.raises(ThinwireError, match="the disk is damaged"):
        store.gather(torch.tensor([0, 1]))
