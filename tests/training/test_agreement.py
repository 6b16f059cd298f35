"""Machines with disks of their own go on from the newest checkpoint that is sound on all of them."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.alone import save
from tests.workers import run_workers
from thinwire.checkpoint import Keep, step_of
from thinwire.checkpoint.folder import folder_of
from thinwire.errors import ThinwireError
from thinwire.training.agreement import agree_on_checkpoint

DAMAGED = {
    "later": [(1, 6)],
    "crossed": [(1, 6), (0, 4)],
    "apart": [(1, 6), (0, 4), (1, 2)],
    "none": [(1, 2), (1, 4), (1, 6)],
}


def agree_all(rank: int, world_size: int, folder: Path) -> dict[str, tuple[int, str]]:
    """The step that this rank is to go on from, or why it can't, and what is said of it; every rank has a disk."""
    told: dict[str, tuple[int, str]] = {}
    for case in ("sound", *DAMAGED):
        try:
            chosen, rows = agree_on_checkpoint(folder / case / str(rank), verifies=rank > 0)
            told[case] = step_of(chosen), str(rows)
        except ThinwireError as error:
            told[case] = -1, str(error)
    return told


def test_the_newest_that_is_sound_on_every_disk(tmp_path: Path) -> None:
    for case in ("sound", *DAMAGED):
        for rank in range(2):
            save(tmp_path / case / str(rank), 2, 4, 6, keep=Keep(3))
        for rank, step in DAMAGED.get(case, []):
            part = folder_of(tmp_path / case / str(rank), step) / "rank0/__0_0.distcp"
            part.write_bytes(part.read_bytes()[:-1] + b"x")
    first, second = run_workers(agree_all, 2, tmp_path)
    assert first["sound"] == second["sound"] == (6, "[]")
    assert first["later"][0] == second["later"][0] == 4 and "[4, 6]" in first["later"][1]
    assert "rank0/__0_0.distcp is damaged" in second["later"][1]
    assert first["crossed"][0] == second["crossed"][0] == 2
    assert first["apart"][0] == second["apart"][0] == -1
    assert "no checkpoint lies on the disks of all ranks (rank 0: [2, 6]; rank 1: [4])" in first["apart"][1]
    assert first["none"] == second["none"] and first["none"][0] == -1, "nobody waits for who has nothing sound"
    assert (
        first["none"][1].startswith("rank 1: no checkpoint is sound") and str(tmp_path / "none/1") in first["none"][1]
    )
