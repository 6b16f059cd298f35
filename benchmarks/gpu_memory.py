"""How fast a GPU reads what lies in the host's memory, and what a cut loss costs there.

    python benchmarks/gpu_memory.py [--quick] [--only copies rows losses] [--json FILE]

copies: GB/s between host and device, from pageable and from pinned memory. rows: GB/s of random rows of a matrix in the
host's memory, gathered there and copied; gathered into pinned memory and copied; and gathered by the GPU, which reads
registered pages in place. Also how many lines of 128 bytes a row's reads touch, in order and with the circular shift.
losses: milliseconds and extra memory of each implementation of the cross-entropy over a large vocabulary.

Without a GPU the CPU half runs: memory stands for the device, and nothing is read in place, which has not run on a GPU
yet. Medians; sizes are stated beside each figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thinwire.losses import cut_cross_entropy
from thinwire.tiers.shift import lines_read

REPEATS = 7
PARTS = ("copies", "rows", "losses")


@dataclass(frozen=True)
class MemoryFigure:
    """A measured value, of which kind, and of what."""

    part: str
    name: str
    value: float
    unit: str
    of: str


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call, behind one that is not counted."""
    taken = []
    for number in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken += [time.perf_counter() - start] if number else []
    return statistics.median(taken)


def copies(device: torch.device, num_bytes: int) -> Iterator[MemoryFigure]:
    """Both directions."""
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for kind in ("pageable", "pinned") if device.type == "cuda" else ("pageable",):
        here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, into, source in (("to the device", there, here), ("from the device", here, there)):
            taken = seconds(partial(into.copy_, source, non_blocking=True), device)
            yield MemoryFigure("copies", f"{kind} {name}", num_bytes / taken / 1e9, "GB/s", f"{num_bytes / 1e6:g} MB")


class InPlace:
    """Memory of the host, in registered pages, as an array that a GPU reads where it lies."""

    def __init__(self, table: Tensor) -> None:
        status = torch.cuda.cudart().cudaHostRegister(table.data_ptr(), table.nbytes, 0)
        if int(status):
            raise RuntimeError(f"{table.nbytes:,} bytes can't be registered: {status}")
        self.table = table
        self.__cuda_array_interface__ = {
            "shape": tuple(table.shape), "typestr": "<f4", "data": (table.data_ptr(), False), "version": 3,
        }  # fmt: skip


def rows(device: torch.device, num_rows: int, width: int, wanted: int) -> Iterator[MemoryFigure]:
    """Each way to bring rows to the device, whose results must be the same."""
    table = torch.randn(num_rows, width)
    numbers = torch.randint(0, num_rows, (wanted,), generator=torch.Generator().manual_seed(0))
    staging = torch.empty(wanted, width, pin_memory=device.type == "cuda")
    ways: dict[str, Callable[[], Tensor]] = {
        "gathered, then copied": lambda: table[numbers].to(device),
        "gathered into staging memory, then copied": lambda: torch.index_select(table, 0, numbers, out=staging).to(
            device, non_blocking=True
        ),
    }
    if device.type == "cuda":
        in_place, there = torch.as_tensor(InPlace(table), device=device), numbers.to(device)
        ways["read in place"] = partial(torch.index_select, in_place, 0, there)
    moved, of = wanted * width * table.itemsize, f"{wanted:,} of {num_rows:,} rows of {width * table.itemsize} bytes"
    for name, way in ways.items():
        assert torch.equal(way().cpu(), table[numbers]), name
        yield MemoryFigure("rows", name, moved / seconds(way, device) / 1e9, "GB/s", of)
    some = numbers[:64].tolist()
    for name in ("plain", "shifted"):
        shifts = name == "shifted"
        touched = sum(lines_read(width, row * width, at * width, shifts=shifts) for at, row in enumerate(some))
        yield MemoryFigure("rows", f"lines of a row, {name}", touched / len(some), "lines", of)


def losses(device: torch.device, num_tokens: int, width: int, vocabulary: int) -> Iterator[MemoryFigure]:
    """Forward and backward of each implementation."""
    draw = torch.Generator().manual_seed(0)
    e = torch.randn(num_tokens, width, generator=draw).to(device).requires_grad_()
    c = (torch.randn(vocabulary, width, generator=draw) * 0.02).to(device).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=draw).to(device)
    of = f"{num_tokens} tokens, width {width}, {vocabulary} words"
    for impl in ("plain", "fused", "tiles", *(["torch"] if hasattr(F, "linear_cross_entropy") else [])):

        def step(impl: str = impl) -> None:
            e.grad = c.grad = None
            cut_cross_entropy(e, c, targets, impl=impl).backward()

        yield MemoryFigure("losses", impl, 1e3 * seconds(step, device), "ms", of)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            yield MemoryFigure("losses", impl, (torch.cuda.max_memory_allocated() - before) / 1e6, "MB", of)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(torch.cuda.get_device_name() if device.type == "cuda" else "no GPU found: the CPU half")
    found: list[MemoryFigure] = []
    if "copies" in asked.only:
        found += copies(device, 1 << 20 if asked.quick else 1 << 28)
    if "rows" in asked.only:
        found += rows(device, *((1000, 50, 200) if asked.quick else (1_000_000, 250, 32_768)))
    if "losses" in asked.only:
        found += losses(device, *((64, 16, 500) if asked.quick else (4096, 1024, 65_536)))
    for each in found:
        print(f"{each.part:8} {each.name:44} {each.value:10.3f} {each.unit:6} {each.of}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"device": device.type, "figures": [asdict(each) for each in found]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
