"""What a checkpoint costs: against torch.save and torch.load of the same bytes on the same disk, and for training.

    python benchmarks/checkpoint.py [--millions 10 100 500] [--repeats 3] [--folder DIR] [--no-training]

For models of so many million parameters with AdamW's state, 12 bytes each, prints ratios of medians, of works that
take turns: save and load over torch's (both into new files, with fsync; ours also takes checksums of all it writes), a
load after all checksums were compared, also over torch's, a load in another layout (4 ranks' parts to 3 ranks) over one
in the same, and the largest memory beyond the state during each, in MB. Then trains the demo model alone, and prints
how long training stands still for a save, as a share of a step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.checkpoint import Disk, Keep, Piece, Saver, Snapshot, verify
from thinwire.checkpoint.dcp import Index, read_part, read_pieces
from thinwire.checkpoint.folder import checksum
from thinwire.checkpoint.parts import part_of, parts_of
from thinwire.checkpoint.saver import write_part
from thinwire.run.config import TrainConfig
from thinwire.run.place import ProcessPlace
from thinwire.run.run import Run
from thinwire.run.signals import StopFlag
from thinwire.training.trainer import Trainer

NUMEL = 1_000_000
KINDS = ("weights", "optimizer/exp_avg", "optimizer/exp_avg_sq")
WRITERS, READERS = 4, 3


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def interleaved(
    repeats: int, *works: Callable[[], object], before: Callable[[], object] | None = None
) -> list[tuple[float, float]]:
    """Of each work, (the median of its seconds, most MB that it needed beyond what was held before).

    They take turns, so that what else the machine does is shared by all. before: comes before each, and is not counted.
    """
    seconds: list[list[float]] = [[] for _ in works]
    extra = [0] * len(works)
    for _ in range(repeats):
        for number, work in enumerate(works):
            if before:
                before()
            Path("/proc/self/clear_refs").write_text("5")
            held, start = memory("VmRSS"), time.perf_counter()
            work()
            seconds[number].append(time.perf_counter() - start)
            extra[number] = max(extra[number], memory("VmHWM") - held)
    return [(statistics.median(taken), most / 1e6) for taken, most in zip(seconds, extra, strict=True)]


def part(state: dict[str, torch.Tensor], number: int, count: int) -> dict[str, Piece]:
    """What the `number`-th of `count` ranks owns of each tensor, in the tensor's memory."""
    return {name: Piece.whole(tensor).share(number, count) for name, tensor in state.items()}


def save_with_torch(state: dict[str, torch.Tensor], file: Path) -> None:
    torch.save(state, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def index_of(folder: Path) -> Index:
    index: Index = {}
    for rank in parts_of(folder):
        for name, chunks in read_part(rank)[1].items():
            index.setdefault(name, []).extend(chunks)
    return index


def on_disk(millions: int, folder: Path, repeats: int) -> None:
    """One row of the table."""
    state = {f"{kind}/layer{n}": torch.randn(NUMEL) for kind in KINDS for n in range(millions)}
    file, whole, parts = folder / "torch.pt", folder / "whole", folder / "parts"

    def clear() -> None:
        # Or the one would write over its old file, and the other delete its own.
        file.unlink(missing_ok=True)
        shutil.rmtree(whole, ignore_errors=True)

    (plain, plain_mb), (save, save_mb) = interleaved(
        repeats,
        lambda: save_with_torch(state, file),
        lambda: write_part(part_of(whole, 0), {}, part(state, 0, 1)),
        before=clear,
    )
    save_with_torch(state, file)
    index = index_of(whole)
    # Into memory that is there, as into a model's; torch.load makes its own.
    (plain_load, plain_load_mb), (load, load_mb), (check, _) = interleaved(
        repeats,
        lambda: torch.load(file, weights_only=True),
        lambda: read_pieces(whole, index, part(state, 0, 1)),
        lambda: [checksum(path) for path in part_of(whole, 0).iterdir()],
    )
    file.unlink()
    shutil.rmtree(whole)
    for number in range(WRITERS):
        write_part(part_of(parts, number), {}, part(state, number, WRITERS))
    split = index_of(parts)

    def load_as(count: int) -> None:
        for number in range(count):
            read_pieces(parts, split, part(state, number, count))

    (same, _), (other, other_mb) = interleaved(repeats, lambda: load_as(WRITERS), lambda: load_as(READERS))
    ratios = [
        f"{plain:.2f}",
        f"{save / plain:.2f}",
        f"{plain_load:.2f}",
        f"{load / plain_load:.2f}",
        f"{(check + load) / plain_load:.2f}",
        f"{other / same:.2f}",
    ]
    extra = [f"{mb:.0f}" for mb in (plain_mb, save_mb, plain_load_mb, load_mb, other_mb)]
    row(str(millions), str(12 * millions), *ratios, *extra)


def row(*cells: str) -> None:
    print(" ".join(f"{cell:>10}" for cell in cells), flush=True)


def in_training(folder: Path, steps: int) -> None:
    """How long a step of the demo model waits for a save that follows it."""
    config = TrainConfig(
        model="demo", strategy="sdp4bit", workers=1, micro_batch=2, steps=10_000, checkpoint_every=0, eval_sequences=0,
        sample_tokens=0, dtype="fp32", run_dir=str(folder / "run"), keep_last=1,
    )  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    trainer = Trainer(Run.of(config), ProcessPlace(0, 0, 1), StopFlag(), "fp32", [])
    plain: list[float] = []
    busy: list[float] = []
    stalls: list[float] = []
    for number in range(3 * steps):
        start = time.perf_counter()
        trainer._take_step()
        # The first save of all allocates, and is left out.
        (busy if number % 3 == 1 else plain).append(time.perf_counter() - start)
        if number % 3 == 0:
            start = time.perf_counter()
            trainer.checkpoints.save(trainer.step)
            stalls.append(time.perf_counter() - start)
        if number % 3 == 1:
            trainer.checkpoints.saver.wait()
    step, stall, during = map(statistics.median, (plain[1:], stalls[1:], busy[1:]))
    print(
        f"demo model, 1 rank: step {step:.3f} s; it stands still {stall:.4f} s for a save, {stall / step:.1%} of a step"
    )
    print(f"a step while a save is written takes {during / step:.2f} of one without")
    trainer.checkpoints.saver.close()
    trainer.optimizer.close()


def staged(millions: int, folder: Path) -> None:
    """What the training thread does of a save, the first and the later times."""
    state = {f"{kind}/layer{n}": torch.randn(NUMEL) for kind in KINDS for n in range(millions)}
    snapshot = Snapshot({}, {name: Piece.whole(tensor) for name, tensor in state.items()})
    saver = Saver(folder / "staged", Disk(0, (0,)), dist.HashStore(), Keep(1), 600.0)
    seconds = []
    for step in (1, 2, 3):
        start = time.perf_counter()
        saver.save(step, snapshot, loss=None, about={})
        seconds.append(time.perf_counter() - start)
        saver.wait()
    saver.close()
    start = time.perf_counter()
    verify(folder / "staged" / "step-00000003")
    check = time.perf_counter() - start
    first, later = seconds[0], min(seconds[1:])
    print(f"{millions} M on one rank: copied in {first:.3f} s at first, then {later:.3f} s; verified in {check:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; seconds of torch, ratios to them, MB beside the state")
    row(
        "million",
        "MB",
        "torch save",
        "ratio",
        "torch load",
        "ratio",
        "checked",
        "reshard",
        "t.save MB",
        "save",
        "t.load",
        "load",
        "reshard",
    )
    for millions in arguments.millions:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            on_disk(millions, Path(folder), arguments.repeats)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        staged(arguments.millions[0], Path(folder))
        if not arguments.no_training:
            in_training(Path(folder), steps=5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
