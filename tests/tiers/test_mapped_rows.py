"""Rows in a file that ranks share: the same rows, one copy of the pages, and damage that is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import run_workers
from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers import BLOCK_BYTES, MappedRows

NUM_ROWS, WIDTH = 4096, 1024


def table() -> torch.Tensor:
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def mapped_bytes(path: Path) -> tuple[int, int]:
    """This process's share of the pages of a mapped file, and those that nobody shares, in bytes."""
    found, is_here = {"Pss": 0, "Private_Dirty": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            is_here = bool(rest) and rest[-1] == str(path)
        elif is_here and word[:-1] in found:
            found[word[:-1]] += 1024 * int(rest[0])
    return found["Pss"], found["Private_Dirty"]


def shared(rank: int, world_size: int, path: Path) -> tuple[bool, int, int]:
    values = table()
    if rank == 0:
        MappedRows.create(path, values.split(1000))
    dist.barrier()
    rows = MappedRows(path)
    own = torch.arange(rank, NUM_ROWS, world_size)
    found = [torch.empty(NUM_ROWS // world_size, WIDTH) for _ in range(world_size)]
    dist.all_gather(found, rows[own])
    is_whole = torch.equal(torch.stack(found, dim=1).view(NUM_ROWS, WIDTH), values)
    # Every rank reads every page.
    for part in torch.arange(NUM_ROWS).split(512):
        assert torch.equal(rows[part], values[part])
    dist.barrier()
    pss, private = mapped_bytes(path)
    dist.barrier()
    return is_whole, pss, private


def test_ranks_share_the_pages_of_one_table(tmp_path: Path) -> None:
    """Four ranks that read all of it hold one copy together."""
    told = run_workers(shared, 4, tmp_path / "rows")
    size = 4 * NUM_ROWS * WIDTH
    assert all(is_whole and private == 0 for is_whole, _, private in told)
    assert 0.95 * size < sum(pss for _, pss, _ in told) < 1.1 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_one_opening_writes_another_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(21).view(7, 3).to(dtype)
    path = tmp_path / "rows"
    rows = MappedRows.create(path, [values])
    assert len(rows) == 7 and torch.equal(rows[:], values)
    writer = MappedRows(path, writable=True)
    writer.put(5, -values[5:])
    # Both are views of the file's pages: nothing was copied, and nothing moved.
    for each in (rows, writer):
        assert each._rows.data_ptr() == each._memory.data_ptr() + BLOCK_BYTES
    for each in (rows, MappedRows(path)):
        assert torch.equal(each[[6, 4]], torch.stack([-values[6], values[4]]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    path, row_bytes = tmp_path / "rows", 4 * 10
    pristine = MappedRows.create(path, [torch.randn(50, 10)]).path.read_bytes()
    end, where = BLOCK_BYTES + 50 * row_bytes, f"rows {path}"
    cases = [
        (BLOCK_BYTES + 7 * row_bytes + 3, f"{where}: row 7 not what was written"),
        (end, f"{where}: what lies behind row 49, the last, is not .* a write past the end"),
        (end + row_bytes, f"{where}: the checksums of its rows were overwritten"),
        (30, f"{where}: its head was overwritten"),
    ]
    for place, told in cases:
        content = bytearray(pristine)
        content[place] ^= 255
        path.write_bytes(content)
        with pytest.raises(ThinwireError, match=told):
            MappedRows(path)[:]
    path.write_bytes(pristine[:-8])
    with pytest.raises(ThinwireError, match="it was cut or grew"):
        MappedRows(path)
    # While it is open, too.
    path.write_bytes(pristine)
    rows = MappedRows(path)
    with path.open("r+b") as file:
        file.seek(end)
        file.write(bytes(row_bytes))
    with pytest.raises(ThinwireError, match="a write past the end"):
        rows[3]


def test_files_and_writes_that_can_not_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(9000))
    with pytest.raises(ConfigError, match=r"MappedRows.create did not write this file"):
        MappedRows(path)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        MappedRows(tmp_path / "none")
    for parts, told in (
        ([torch.zeros(0, 3)], "at least one row"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "of one width"),
    ):
        with pytest.raises(ConfigError, match=told):
            MappedRows.create(tmp_path / "new", parts)
    rows = MappedRows.create(path, [torch.ones(2, 2)])
    with pytest.raises(ConfigError, match="nearest: MappedRows\\(path, writable=True\\)"):
        rows.put(0, torch.zeros(1, 2))
    with pytest.raises(IndexError, match="rows 1 to 2 of 2"):
        MappedRows(path, writable=True).put(1, torch.zeros(2, 2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows"]
