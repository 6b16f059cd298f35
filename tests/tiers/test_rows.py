"""Rows that are read from a disk are those that were written, and little else is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers import BLOCK_BYTES, DiskFile, DiskRows, GrowingRows, Pace, TierMeter
from thinwire.tiers.disk_rows import STAGING_BYTES
from thinwire.tiers.pool import aligned, pages

ROWS = 700


def stored(folder: Path, values: torch.Tensor, place: int) -> DiskRows:
    """A store of these rows, from byte `place` on."""
    octets = values.view(torch.uint8).view(-1)
    memory = pages(aligned(place + len(octets)))
    memory[place : place + len(octets)] = octets
    file = DiskFile(folder, len(memory), TierMeter(), Pace(None))
    file.write(0, memory)
    store = DiskRows(file, place, len(values), values.shape[1], values.dtype)
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
        distinct, read = len(idx.unique()), read - aligned(store.row_bytes)
        assert distinct * store.row_bytes <= read <= distinct * (store.row_bytes + 3 * BLOCK_BYTES)
    out = torch.empty(2, width, dtype=dtype)
    assert store.gather(torch.tensor([5, 1]), out) is out and torch.equal(out, values[[5, 1]])
    # All rows together take few blocks more than they have, and pass through the memory of two parts.
    assert read <= ROWS * store.row_bytes * 1.02 + 2 * BLOCK_BYTES
    assert store.staging_bytes == 2 * max(STAGING_BYTES, aligned(store.row_bytes) + BLOCK_BYTES)


def test_rows_that_are_not_there_or_are_damaged_are_refused(tmp_path: Path) -> None:
    values = torch.arange(4096.0).view(64, 64)
    store = stored(tmp_path, values, BLOCK_BYTES)
    for number in (-1, 64):
        with pytest.raises(IndexError, match=f"store .*: row {number} of 64"):
            store.gather(torch.tensor([3, number]))
    for names_none in (None, ..., "a", (slice(1), 2), (1, 2)):
        with pytest.raises(IndexError, match=r"store .* names no rows; nearest: rows\[:\]"):
            store[names_none]  # type: ignore[index]
    for wrong in (torch.empty(3, 2, 64), torch.empty(2, 64, dtype=torch.float64)):
        with pytest.raises(ConfigError, match=r"out is .*; it must be \[2, 64\] in torch.float32"):
            store.gather(torch.tensor([0, 1]), wrong)
    memory = pages(BLOCK_BYTES)
    store.file.read(BLOCK_BYTES, memory)
    # Two words of the second row change places.
    memory.view(torch.int32)[64:66] = memory.view(torch.int32)[64:66].flip(0)
    store.file.write(BLOCK_BYTES, memory)
    assert torch.equal(store.gather(torch.tensor([0, 2])), values[[0, 2]])
    with pytest.raises(ThinwireError, match="row 1 not what was written: the disk is damaged"):
        store.gather(torch.tensor([0, 1]))


def test_an_index_says_where_the_rows_lie(tmp_path: Path) -> None:
    """The table of placements, with the device "meta" in the place of an accelerator: there only shapes are known."""
    values = torch.arange(96.0).view(24, 4)
    store = stored(tmp_path, values, 0)
    mask = torch.arange(24) % 5 == 0
    same: list[Any] = [
        3,
        -1,
        torch.tensor(7),
        slice(2, 9),
        slice(None, None, 5),
        [1, 1, 0],
        mask,
        torch.tensor([[4], [-2]]),
        [],
    ]
    for idx in same:
        assert torch.equal(store[idx], values[idx]), idx
    numbers = stored(tmp_path, torch.tensor([[5.0], [5.0], [23.0]]), 0)
    assert torch.equal(store[numbers], values[[5, 5, 23]])
    store.device = torch.device("meta")
    placed: list[tuple[Any, int | None, str]] = [
        (torch.tensor([1, 2], device="meta"), 2, "meta"),
        (torch.tensor(2, device="meta"), None, "meta"),
        (torch.tensor(2), None, "meta"),
        (2, None, "meta"),
        (slice(3), 3, "meta"),
        (numbers, 3, "meta"),
        (torch.tensor([1, 2]), 2, "cpu"),
        ([1, 2], 2, "cpu"),
        (mask, 5, "cpu"),
    ]
    for idx, num, device in placed:
        found = store[idx]
        assert (found.device.type, found.shape) == (device, (4,) if num is None else (num, 4)), idx
    wrong: list[tuple[Any, str]] = [
        (torch.ones(3, dtype=torch.bool), "a mask of shape"),
        ([0.5], "whole numbers"),
        (24, "row 24 of 24"),
        (-25, "row -25 of 24"),
    ]
    for idx, told in wrong:
        with pytest.raises(IndexError, match=told):
            store[idx]


def test_a_disk_that_gives_zeros_is_found_by_the_canary(tmp_path: Path) -> None:
    """Rows of zeros, such as that of padding, have the checksum of what such a disk gives."""
    store = stored(tmp_path, torch.zeros(9, 40), 0)
    assert store.file.num_bytes == 2 * BLOCK_BYTES and torch.equal(store[[2]], torch.zeros(1, 40))
    store.file.write(0, pages(2 * BLOCK_BYTES).zero_())
    with pytest.raises(ThinwireError, match=f"store {tmp_path}: the canary row is not what was written"):
        store[[2]]


@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_that_were_never_put_are_zeros(tmp_path: Path, on_disk: bool) -> None:
    meter = TierMeter()
    rows = GrowingRows(tmp_path / "store" if on_disk else None, 6, torch.bfloat16, meter)
    assert rows.values().shape == (0, 6)
    expected = torch.zeros(40, 6, dtype=torch.bfloat16)
    for numbers in ([5, 2], [39], [2, 17, 20]):
        expected[numbers] = torch.randn(len(numbers), 6).bfloat16()
        rows.put(torch.tensor(numbers), expected[numbers])
        num = rows.num_rows
        assert torch.equal(rows[:], expected[:num]) and torch.equal(rows.values(), expected[:num])
    rows.reach(64)
    assert torch.equal(rows[[63, 17]], torch.stack([torch.zeros(6, dtype=torch.bfloat16), expected[17]]))
    assert (meter.snapshot().written_bytes == 7 * 12) == on_disk
    if on_disk:
        assert rows._file is not None
        os.pwrite(rows._file.fileno(), bytes(12), 21 * 12)
        with pytest.raises(ThinwireError, match=f"store {tmp_path / 'store'}: row 20 not what was written"):
            rows[[5, 20]]
        # Those of rows that were never put are the zeros that a broken file gives, too.
        os.pwrite(rows._file.fileno(), bytes(64 * 12), 0)
        with pytest.raises(ThinwireError, match=f"store {tmp_path / 'store'}: the canary row is not what was written"):
            rows[[63]]
    rows.close()
    assert not [entry for entry in tmp_path.rglob("*") if entry.is_file()]
