"""Complete or absent, sound or named: kills, damage, full disks, poison, and what is kept."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.serialization import get_crc32_options

from tests.checkpoint.alone import NUMEL, kill_savers, read, save
from tests.workers import CONTEXT, HANG_S
from thinwire import cli
from thinwire.checkpoint import (
    CheckpointError,
    Keep,
    Piece,
    Source,
    all_of,
    choose,
    latest,
    next_loss,
    passed_over,
    step_of,
    verify,
)
from thinwire.checkpoint.dcp import SummedFile, write_pieces
from thinwire.checkpoint.folder import checksum, folder_of, note_next_loss, point_to
from thinwire.errors import ConfigError

NUM_KILLS = 50


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and choose(tmp_path) == (None, []) and step_of(None) == 0
    assert save(tmp_path, 5) == []
    newest = latest(tmp_path)
    assert newest is not None and step_of(newest) == 5 and verify(newest).loss == 2.0
    source = Source(newest, 0)
    assert torch.equal(read(newest), torch.full((NUMEL,), 5.0))
    part = torch.empty(7)
    source.read({"weights/b": Piece(NUMEL, 11, part)})
    assert part.tolist() == [5.0] * 7
    own = source.own("memory")
    assert own[0].tolist() == [5, 6, 7] and own[1]["count"] == 5 and own[1][7].shape == (2, 2)
    assert source.scalar("step", "a") == 5 and source.common["steps"] == 5
    assert source.fits({"rank": 0}) and not source.fits({"rank": 1})
    with pytest.raises(CheckpointError, match="saved with 20000 float32 elements, and there are 3"):
        source.read({"weights/a": Piece(3, 0, torch.empty(3))})
    with pytest.raises(CheckpointError, match="elements 0 to 2 of 'weights/c' are not there"):
        source.read({"weights/c": Piece(2, 0, torch.empty(2))})


def test_the_name_comes_after_the_files_are_on_the_disk_and_the_pointer_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note(kind: str, path: str | Path) -> None:
        done.append(f"{kind} {Path(path).relative_to(tmp_path)}")

    def noted_fsync(descriptor: int) -> None:
        note("sync", Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        rename(source, target)
        note("name", target)

    def noted_replace(source: Path, target: Path) -> None:
        replace(source, target)
        note("name", target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr(os, "replace", noted_replace)
    save(tmp_path, 5)
    named = done.index("name step-00000005")
    before = {line for line in done[:named] if line.startswith("sync")}
    temporary = ".step-00000005.tmp"
    assert {f"sync {temporary}/rank0/__0_0.distcp", f"sync {temporary}/rank0", f"sync {temporary}"} <= before
    assert {f"sync {temporary}/rank0/.state.json.tmp", f"sync {temporary}/.manifest.json.tmp"} <= before
    assert f"name {temporary}/rank0/state.json" in done[:named] and f"name {temporary}/manifest.json" in done[:named]
    assert done[named + 1 :] == ["sync .", "sync .latest.tmp", "name latest", "sync ."]


def test_the_stated_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    sums = write_pieces(tmp_path, {"weights/a": Piece.whole(torch.arange(500_001.0))}, {})
    for name in ("__0_0.distcp", "state.json"):
        assert sums[name] == checksum(tmp_path / name)
    assert sums["__0_0.distcp"][0] > 2_000_004


def test_torch_takes_no_checksums_of_the_same_bytes_and_other_threads_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, seen = SummedFile.write, set()

    def noted(file: SummedFile, data: bytes) -> int:
        with ThreadPoolExecutor(1) as other:
            seen.add((get_crc32_options(), other.submit(get_crc32_options).result()))
        return write(file, data)

    monkeypatch.setattr(SummedFile, "write", noted)
    write_pieces(tmp_path, {"weights/a": Piece.whole(torch.ones(3))}, {})
    assert seen == {(False, True)} and get_crc32_options()


def test_what_the_disk_refuses_while_more_is_written_is_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, calls, fsync = {f"weights/{n}": Piece.whole(torch.ones(NUMEL)) for n in range(8)}, count(), os.fsync

    def refuse_once(descriptor: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.EIO, "the disk is broken")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_once)
    monkeypatch.setattr("thinwire.checkpoint.dcp.SYNC_BYTES", 4 * NUMEL)
    with pytest.raises(OSError, match="the disk is broken"):
        write_pieces(tmp_path / "broken", state, {})
    assert write_pieces(tmp_path / "whole", state, {}) and next(calls) > 4


def test_killed_at_any_moment_the_last_complete_one_is_sound(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=kill_savers, args=(tmp_path, NUM_KILLS, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(HANG_S)
        cut_short = ours.recv()
    finally:
        process.kill()
        process.join()
    assert len(cut_short) >= NUM_KILLS
    save(tmp_path, cut_short[-1] + 1)
    assert not list(tmp_path.glob(".step-*")), "what was cut short is cleared away"


@pytest.mark.parametrize("file", ["manifest.json", "next_loss.json"])
def test_another_digit_is_damage_too(tmp_path: Path, file: str) -> None:
    save(tmp_path, 5, 10)
    note_next_loss(folder_of(tmp_path, 10), 2.5)
    assert next_loss(folder_of(tmp_path, 10)) == 2.5 and choose(tmp_path) == (folder_of(tmp_path, 10), [])
    path = folder_of(tmp_path, 10) / file
    text = path.read_text()
    path.write_text(text.replace('"step": 10', '"step": 70').replace("2.5", "9.5"))
    assert path.read_text() != text
    with pytest.raises(CheckpointError, match=f"{file} is damaged: its checksum is wrong"):
        verify(folder_of(tmp_path, 10))
    assert choose(tmp_path)[0] == folder_of(tmp_path, 5)


@pytest.mark.parametrize("file", ["rank0/__0_0.distcp", "rank0/state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing"])
def test_damage_is_found_and_the_one_before_is_taken(tmp_path: Path, file: str, harm: str) -> None:
    save(tmp_path, 5, 10)
    path = folder_of(tmp_path, 10) / file
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :])
    with pytest.raises(CheckpointError, match=file):
        verify(folder_of(tmp_path, 10))
    chosen, wrong = choose(tmp_path)
    assert chosen == folder_of(tmp_path, 5) and file in wrong[0]
    assert (tmp_path / "latest").read_text() == "step-00000005"


def test_where_none_is_sound_all_are_named(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    for step in (5, 10):
        (folder_of(tmp_path, step) / "rank0/state.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint is sound.*step-00000010.*step-00000005"):
        choose(tmp_path)


def test_a_pointer_to_nowhere_is_no_harm(tmp_path: Path) -> None:
    save(tmp_path, 5)
    for content in ("step-1", "../..", "\0"):
        (tmp_path / "latest").write_text(content)
        assert choose(tmp_path) == (folder_of(tmp_path, 5), [])


def test_a_full_disk_leaves_training_and_the_last_one_alone(tmp_path: Path) -> None:
    save(tmp_path, 5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUMEL, before[1]))
    try:
        (problem,) = save(tmp_path, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "step 10 was not saved: rank 0: " in problem and "too large" in problem
    assert choose(tmp_path) == (folder_of(tmp_path, 5), []) and not list(tmp_path.glob(".step-*"))
    assert save(tmp_path, 10) == [] and step_of(latest(tmp_path)) == 10


class Poison:
    def __reduce__(self) -> tuple:
        return os.system, ("touch poisoned",)


@pytest.mark.parametrize("file", ["rank0/__0_0.distcp", "rank0/state.json", "manifest.json", ".metadata"])
def test_a_malicious_pickle_is_not_executed(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 5)
    checkpoint = folder_of(tmp_path, 5)
    if file.endswith("distcp"):
        # A file that torch.save has made, and an index that leads there.
        torch.save(Poison(), checkpoint / file)
        state = json.loads((checkpoint / "rank0/state.json").read_bytes())
        state["chunks"]["weights/a"][-2:] = [0, (checkpoint / file).stat().st_size]
        (checkpoint / "rank0/state.json").write_text(json.dumps(state))
    else:
        (checkpoint / file).write_bytes(pickle.dumps(Poison()))
    if file == ".metadata":
        verify(checkpoint)
        assert b"Poison" not in (checkpoint / file).read_bytes() and "is written anew" in caplog.text
        assert torch.equal(read(checkpoint), torch.full((NUMEL,), 5.0)), "nobody reads it"
    else:
        with pytest.raises(CheckpointError, match=r"distcp|state|manifest"):
            verify(checkpoint)
        with pytest.raises(CheckpointError):
            read(checkpoint)
    assert not (tmp_path / "poisoned").exists()


def test_torch_reads_it_too(tmp_path: Path) -> None:
    save(tmp_path, 5)
    state = {"weights/a": torch.empty(NUMEL)}
    dcp.load(state, checkpoint_id=folder_of(tmp_path, 5), no_dist=True)
    assert torch.equal(state["weights/a"], torch.full((NUMEL,), 5.0))


def test_what_is_kept(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 6.0, 6: 2.0, 7: 2.5}
    save(tmp_path / "last", *losses, losses=losses)
    save(tmp_path / "all", *losses, keep=Keep(1, every=3, best=True), losses=losses)
    assert [step_of(path) for path in all_of(tmp_path / "last")] == [6, 7]
    assert [step_of(path) for path in all_of(tmp_path / "all")] == [2, 3, 6, 7]


def test_what_lies_beyond_the_last_one_is_named_and_takes_no_place(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    point_to(folder_of(tmp_path, 5))
    (tmp_path / ".step-00000012.tmp").mkdir()
    cut_short, later = passed_over(tmp_path)
    assert ".step-00000012.tmp: its save was cut short" in cut_short
    assert "step-00000010: " in later and later.endswith("names an earlier one")
    assert save(tmp_path, 6, 7) == []
    assert [step_of(path) for path in all_of(tmp_path)] == [6, 7, 10] and step_of(latest(tmp_path)) == 7


def test_the_next_loss_is_kept_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert next_loss(folder_of(tmp_path, 5)) is None
    note_next_loss(folder_of(tmp_path, 5), 0.1 + 0.2)
    assert next_loss(folder_of(tmp_path, 5)) == 0.1 + 0.2
    note_next_loss(folder_of(tmp_path, 6), 1.0)
    assert not folder_of(tmp_path, 6).exists()


def test_the_command_lists_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "notes" / "checkpoints"
    save(folder, 5, 10)
    save(tmp_path / "other" / "checkpoints", 5)
    tmp_path = tmp_path / "notes"
    assert cli.run(["checkpoints", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "alone on 1 rank(s), not verified" in listed[1] and "2.0000" in listed[1] and listed[2].endswith("latest")
    assert cli.run(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out.count(" verified 20") == 2
    (folder_of(folder, 5) / "rank0/state.json").write_text("{}")
    assert cli.run(["checkpoints", str(tmp_path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and "rank0/state.json has 2 bytes" in out
    shutil.rmtree(folder_of(folder, 5))
    save(tmp_path / "island-1/checkpoints", 10)
    assert cli.run(["checkpoints", str(tmp_path), "--verify"]) == 0
    assert "island-1:" in capsys.readouterr().out
    (folder_of(tmp_path / "island-1/checkpoints", 10) / "rank0/state.json").write_text("{}")
    assert cli.run(["checkpoints", str(tmp_path), "--verify"]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 1
    shutil.rmtree(tmp_path / "island-1")
    save(folder, 5)
    with pytest.raises(ConfigError, match=r"unexpected .b.: thinwire checkpoints takes RUN alone"):
        cli.run(["checkpoints", "a", "b"])
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        cli.run(["checkpoints", str(folder_of(folder, 5))])
    for command in (["checkpoints"], ["generate"], ["export", "out"]):
        for misspelt in ("notse", "runs/notes"):
            with pytest.raises(ConfigError, match=rf"(holds no|is neither).*did you mean '{tmp_path}'"):
                cli.run([command[0], str(tmp_path.parent / misspelt), *command[1:]])
