"""Claim: a codec costs about as much as copying its input once. GB/s of fp32 input over memcpy's, one thread.

Kernels take turns, each just after a memcpy of the same bytes, so that the machine's load hits both; medians.
    python benchmarks/codecs.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import torch

from thinwire.codecs import (
    Codec,
    CountSketch,
    GaussianSketch,
    Hadamard,
    Integer,
    Natural,
    RandomK,
    Sign,
    Threshold,
    TopK,
    warm,
)

# name -> the least ratio to memcpy that we aim for
TARGETS = {
    "int4 quantise+pack": 0.9,
    "int8 quantise+pack": 0.9,
    "int4 unpack+add": 1.2,
    "int8 unpack+add": 1.2,
    "hadamard-32 + int4": 0.35,
}
CODECS: dict[str, Codec] = {
    "int4": Integer(4, 128, "nearest"),
    "int4 stochastic": Integer(4, 128, "stochastic"),
    "int4 g2048 stochastic": Integer(4, 2048, "stochastic"),
    "int8": Integer(8, 128, "nearest"),
    "int8 stochastic": Integer(8, 128, "stochastic"),
    "int2": Integer(2, 128, "nearest"),
    "int3": Integer(3, 128, "nearest"),
    "int6": Integer(6, 128, "nearest"),
}
ROTATED: dict[str, Hadamard] = {
    "hadamard-32 + int4": Hadamard(Integer(4, 128, "nearest")),
    "hadamard-32 + int4 stochastic": Hadamard(Integer(4, 128, "stochastic")),
    "hadamard-64 + int4": Hadamard(Integer(4, 128, "nearest"), 64),
}
GRADIENTS: dict[str, Codec] = {
    "sign g512": Sign(),
    "e3m0": Natural(4, 128, "nearest"),
    "natural 4 bits": Natural(4),
    "natural 8 bits": Natural(8),
    "top-k 10%": TopK(0.1),
    "top-k 1%": TopK(0.01),
    "top-k 0.1%": TopK(0.001),
    "top-k 1% of 65536": TopK(0.01, 1 << 16),
    "threshold 1% of 65536": Threshold(0.01),
    "random-k 1/32": RandomK(32),
    "count sketch 1/8": CountSketch(8),
    "gaussian sketch 1/8": GaussianSketch(8),
}
MAX_STOCHASTIC = 2.0
# Packets of as many ranks, which are added up in one pass over the sum or one by one.
NUM_PEERS = 4
SUMS = ("int4", "int8")


def kernels(num_elements: int) -> dict[str, Callable[[], object]]:
    """Every measured call, over buffers that were allocated and touched before."""
    x, total = torch.randn(num_elements), torch.zeros(num_elements)
    calls: dict[str, Callable[[], object]] = {"memcpy": lambda: total.copy_(x)}

    def add(name: str, codec: Codec, rotated: bool) -> None:
        packet = codec.encode(x)
        calls[name if rotated else f"{name} quantise+pack"] = lambda: codec.encode(x, seed=1, out=packet)
        if not rotated and "stochastic" not in name:
            calls[f"{name} unpack"] = lambda: codec.decode(packet, num_elements, out=total)
            calls[f"{name} unpack+add"] = lambda: codec.decode_add(packet, total)

    def add_both_ways(name: str, codec: Codec) -> None:
        packet = codec.encode(x)
        calls[f"{name} encode"] = lambda: codec.encode(x, seed=1, out=packet)
        calls[f"{name} decode"] = lambda: codec.decode(packet, num_elements, out=total)
        calls[f"{name} decode+add"] = lambda: codec.decode_add(packet, total)

    def add_sums(name: str, codec: Codec) -> None:
        packets = [codec.encode(x, seed=seed) for seed in range(NUM_PEERS)]
        calls[f"{name} sum of {NUM_PEERS}"] = lambda: codec.decode_sum(packets, total)
        # As a codec without a kernel for it does.
        calls[f"{name} sum of {NUM_PEERS}, one by one"] = lambda: Codec.decode_sum(codec, packets, total)

    for name, codec in CODECS.items():
        add(name, codec, rotated=False)
    for name, codec in ROTATED.items():
        add(name, codec, rotated=True)
    for name, codec in GRADIENTS.items():
        add_both_ways(name, codec)
    for name in SUMS:
        add_sums(name, CODECS[name])
    calls["hadamard-32 in place"] = lambda: ROTATED["hadamard-32 + int4"].rotate_(total)
    return calls


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Each call's median seconds and median ratio to the memcpy just before it, after an unmeasured round."""

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            pair = seconds(calls["memcpy"]), seconds(call)
            if round_:
                pairs[name].append(pair)
    median = statistics.median
    return {name: (median(s for _, s in p), median(copy / s for copy, s in p)) for name, p in pairs.items()}


def report(measured: dict[str, tuple[float, float]], num_bytes: int) -> list[dict[str, object]]:
    """Print the table; one row per kernel."""
    rows: list[dict[str, object]] = []
    print(f"{'kernel':36s} {'GB/s of fp32':>13s} {'x memcpy':>9s} {'target':>7s}")
    for name, (median_s, ratio) in measured.items():
        rate, target = num_bytes / median_s / 1e9, TARGETS.get(name)
        note = "" if target is None else f"{target:7.2f} {'reached' if ratio >= target else 'missed'}"
        print(f"{name:36s} {rate:13.1f} {ratio:9.2f} {note}".rstrip())
        rows.append({"kernel": name, "gb_per_s": rate, "ratio": ratio, "target": target})
    for nearest in ("int4 quantise+pack", "int8 quantise+pack", "hadamard-32 + int4"):
        stochastic = nearest.replace("int4", "int4 stochastic").replace("int8", "int8 stochastic")
        times = measured[nearest][1] / measured[stochastic][1]
        name, verdict = (
            f"stochastic over nearest, {nearest}",
            "reached" if times <= MAX_STOCHASTIC else "missed",
        )
        print(f"{name}: {times:.2f} times the time (at most {MAX_STOCHASTIC}: {verdict})")
        rows.append({"kernel": name, "time_ratio": times, "target": MAX_STOCHASTIC})
    for name in SUMS:
        summed = f"{name} sum of {NUM_PEERS}"
        times = measured[summed][1] / measured[f"{summed}, one by one"][1]
        print(f"{summed} in one pass: {times:.2f} times as fast as one by one")
        rows.append({"kernel": f"one pass over one by one, {summed}", "time_ratio": times})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 MiB and 5 rounds instead of 64 MiB and 21")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_elements, rounds = (1 << 21, 5) if args.quick else (1 << 24, 21)
    warm([*CODECS.values(), *ROTATED.values(), *GRADIENTS.values()])
    versions = f"torch {torch.__version__}, numba {numba.__version__}, {platform.machine()}"
    print(f"{num_elements >> 18} MiB of fp32, one thread, median of {rounds} interleaved rounds; {versions}")
    rows = report(measure(kernels(num_elements), rounds), 4 * num_elements)
    if args.json:
        readme = [
            [f"codec {row['kernel']}, fp32 bytes over memcpy's, one thread", f"{row['ratio']:.2f}"]
            for row in rows
            if row["kernel"] in TARGETS
        ]
        result = {
            "command": "python benchmarks/codecs.py",
            "machine": f"{os.cpu_count()} cores, {versions}",
            "num_elements": num_elements,
            "rows": rows,
            "readme": readme,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
