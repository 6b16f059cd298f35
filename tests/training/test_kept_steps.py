"""Steps that a durable run keeps: which are deleted, which stay, and what a failed run says of them."""

import shutil
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from thinwire.checkpoint.folder import Manifest
from thinwire.launch.failures import failure
from thinwire.run.run_dir import RunDir
from thinwire.training.kept_steps import free_kept


def keep(store: Path, rank: int, *steps: int) -> Path:
    """A rank's folder with these steps."""
    folder = store / f"rank{rank}"
    folder.mkdir(parents=True)
    for turn, step in zip("ab", steps, strict=False):
        (folder / turn).mkdir()
        Manifest(step, None, 2, [[rank]], {}, {}).write(folder / turn)
    (folder / "states").write_bytes(b"1" * 10_000)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    return found


@pytest.mark.parametrize("is_own", [True, False])
def test_only_what_a_run_no_longer_needs_is_deleted(run_dir: RunDir, tmp_path: Path, is_own: bool) -> None:
    store = run_dir.store if is_own else run_dir.own_store(tmp_path / "disk")
    old, later, gone = keep(store, 0, 3, 4), keep(store, 1, 4, 5), keep(store, 2, 4)
    other = keep(RunDir(tmp_path / "copy").own_store(tmp_path / "disk"), 0, 1)
    run_dir.note_store(store)
    run_dir.note_store(other.parent)
    run_dir.note_store(store)
    lines = free_kept(run_dir, 4)
    assert not old.exists() and not gone.exists() and later.exists() and other.exists()
    assert "rank1 keeps step 5, which is later than step 4" in lines[0] and lines[1].startswith("freed ")
    assert free_kept(run_dir, 5)[0].endswith("rank1") and not store.exists() and not free_kept(run_dir, 9)
    run_dir.durable.write_text(f"{keep(store, 0, 1).parent}\n")
    run_dir.delete(0)
    assert not store.exists() and other.exists() and not run_dir.durable.exists()


def test_a_folder_that_its_rank_deletes_meanwhile_is_gone(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    folder = keep(run_dir.store, 0, 1)

    def steps_in(_: Path) -> set[int]:
        shutil.rmtree(folder)
        return {1}

    monkeypatch.setattr("thinwire.training.kept_steps.steps_in", steps_in)
    assert free_kept(run_dir, 1) == []


def test_a_killed_durable_run_goes_on_behind_what_its_disks_hold(run_dir: RunDir) -> None:
    def said(durable: bool) -> str:
        return str(failure({1: ProcessFailure(1, 7, -signal.SIGKILL, "none")}, run_dir, 20.0, durable=durable))

    keep(run_dir.store, 0, 2, 3)
    keep(run_dir.store, 1, 2)
    assert "--resume goes on after step 2, which the durable run keeps on its disks" in said(True)
    assert "no checkpoint is saved, so start anew" in said(False)
    keep(run_dir.store, 2)
    assert "start anew" in said(True)
