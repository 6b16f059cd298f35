"""One rank that saves what tells its step; also again and again, to be killed at any moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import HashStore

from thinwire.checkpoint import Disk, Keep, Piece, Saver, Snapshot, Source, choose, step_of

NUMEL = 20_000


def snapshot(step: int) -> Snapshot:
    """Tensors in which every element is the step's number."""
    values = torch.full((NUMEL,), float(step))
    pieces = {f"weights/{name}": Piece.whole(values) for name in ("a", "b")}
    own = {"memory": [torch.arange(3) + step, {"count": step, 7: torch.ones(2, 2)}]}
    return Snapshot({"rank": 0}, pieces, {"step": {"a": step}}, own, {"steps": step, "shapes": {"a": [NUMEL]}})


def saver(folder: Path, keep: Keep | None = None) -> Saver:
    return Saver(folder, Disk.find(folder, 0, lambda n: [n]), HashStore(), keep or Keep(), 20.0)


def save(folder: Path, *steps: int, keep: Keep | None = None, losses: dict[int, float] | None = None) -> list[str]:
    """Save these steps; what went wrong."""
    mine, problems = saver(folder, keep), []
    for step in steps:
        mine.save(step, snapshot(step), loss=(losses or {}).get(step, 2.0), about={"strategy": "alone"})
        mine.wait()
        problems += mine.problems()
    mine.close()
    return problems


def read(checkpoint: Path, name: str = "weights/a") -> torch.Tensor:
    """What a checkpoint holds, whole."""
    values = torch.empty(NUMEL)
    Source(checkpoint, 0).read({name: Piece.whole(values)})
    return values


def kill_savers(folder: Path, num_kills: int, pipe: Connection) -> None:
    """Kill children that save one step after another, each at a random moment, and look what is left after each.

    Goes on until `num_kills` of them were killed while they saved, after more than 5 steps between them; sends the last
    step that was saved, for each kill.
    """
    torch.set_num_threads(1)
    save(folder / "first", 1)
    start = time.monotonic()
    save(folder / "first", 2)
    save_s = time.monotonic() - start
    chance, seen = random.Random(7), 0
    cut_short: list[int] = []
    while len(cut_short) < num_kills or len(set(cut_short)) <= 5:
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
        pid = os.fork()
        if pid == 0:
            mine = saver(folder)
            for step in range(seen + 1, 1_000_000):
                mine.save(step, snapshot(step), loss=1.0, about={})
        while not any(folder.glob(".step-*")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 2 * save_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        was_saving = any(folder.glob(".step-*"))
        newest, wrong = choose(folder)
        assert not wrong, wrong
        if newest is not None:
            assert torch.equal(read(newest), torch.full((NUMEL,), float(step_of(newest))))
            assert step_of(newest) >= seen
            # A save takes longer than the measured one where others use the machine.
            save_s *= 1.0 if step_of(newest) > seen else 1.2
            seen = step_of(newest)
        else:
            save_s *= 1.2
        if was_saving:
            cut_short.append(seen)
    pipe.send(cut_short)
