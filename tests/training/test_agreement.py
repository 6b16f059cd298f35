"""Machines with disks of their own go on from the newest checkpoint that is sound on all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.alone import save
from tests.workers import run_workers
from thinwire.checkpoint import CheckpointError, Keep, step_of
from thinwire.checkpoint.folder import folder_of, sealed
from thinwire.errors import ConfigError, ThinwireError
from thinwire.launch.check_resume import check_resume
from thinwire.run.config import TrainConfig
from thinwire.run.run_dir import RunDir
from thinwire.run.settings import to_toml
from thinwire.training.agreement import agree_on_checkpoint
from thinwire.training.origin import is_verified

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


def test_a_launcher_with_nothing_sound_leaves_it_to_its_workers_to_tell_other_machines(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir.checkpoints, 2)
    assert not is_verified(run_dir.checkpoints), "nobody has looked"
    assert "goes on after step 2" in str(check_resume(TrainConfig(resume=True, nodes=2), run_dir))
    assert is_verified(run_dir.checkpoints)
    (folder_of(run_dir.checkpoints, 2) / "rank0/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint is sound"):
        check_resume(TrainConfig(resume=True), run_dir)
    (row,) = check_resume(TrainConfig(resume=True, nodes=2), run_dir)
    assert row[1] == "no checkpoint is sound on this machine" and "rank0/state.json has 2 bytes" in row[2]
    assert not is_verified(run_dir.checkpoints), "the first rank looks once more, and tells the others"


def test_options_are_compared_with_those_that_have_saved(tmp_path: Path) -> None:
    """And not with config.toml, which a start that went no further has written."""
    run_dir = RunDir(tmp_path)
    save(run_dir.checkpoints, 2)
    told, asked = (TrainConfig(strategy="diloco", tables={"diloco": {"sync_every": every}}) for every in (4, 5))
    run_dir.claim(0, to_toml(told), overwrite=False)
    resume = replace(asked, resume=True)
    with pytest.raises(ConfigError, match=r"the options \[diloco\] can't change"):
        check_resume(resume, run_dir)
    path = folder_of(run_dir.checkpoints, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["about"]["config"] = to_toml(TrainConfig(strategy="ddp"))
    path.write_bytes(sealed(manifest))
    assert "goes on after step 2" in str(check_resume(resume, run_dir))
    assert "the schedule is stretched: step 2 was one of" in str(check_resume(replace(resume, steps=10**6), run_dir))
