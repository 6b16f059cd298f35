"""Claim: on a GPU a codec costs about as much as copying its input, and every strategy trains tensors that lie there.

Codecs are checked against the CPU's results and timed, each just after a device-to-device copy of the same bytes;
strategies take a few steps in two processes on the one device, joined by gloo; `thinwire train` takes a few there, goes
on from its checkpoint on the CPU, and then on the device again. Torch 2.11 or newer; where no GPU is
found the same code runs on the CPU and says so. What fails is a row with its reason.
    python benchmarks/gpu.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs import (
    Cast,
    Codec,
    CountSketch,
    GaussianSketch,
    Hadamard,
    Identity,
    Integer,
    Natural,
    RandomK,
    Sign,
    Threshold,
    TopK,
    Zstd,
    backends,
    warm,
)
from thinwire.compose import apply
from thinwire.registry import STRATEGIES, strategy_named

GOAL = 0.7
WORLD_SIZE, STEPS, TIMEOUT_S = 2, 4, 60.0
# The first steps compile kernels and lay out buckets.
NUM_SETTLING = 1
CODECS: dict[str, Codec] = {
    "fp32": Identity(),
    "bf16": Cast("bf16"),
    "int4": Integer(4, 128, "nearest"),
    "int4 stochastic": Integer(4, 128, "stochastic"),
    "int4 g2048 stochastic": Integer(4, 2048, "stochastic"),
    "int8": Integer(8, 128, "nearest"),
    "int8 stochastic": Integer(8, 128, "stochastic"),
    "hadamard-32 + int4": Hadamard(Integer(4, 64, "nearest", "bf16")),
    "hadamard-32 + int4 stochastic": Hadamard(Integer(4, 64, "stochastic", "bf16")),
    "hadamard-32 + int8 stochastic": Hadamard(Integer(8, 64, "stochastic", "bf16")),
    "zstd of int4": Zstd(Integer(4, 2048)),
    "sign": Sign(),
    "natural 4 bits": Natural(4),
    "top-k 1%": TopK(0.01),
    "threshold 1% of 65536": Threshold(0.01),
    "random-k 1/32": RandomK(32),
    "count sketch 1/8": CountSketch(8),
    "gaussian sketch 1/8": GaussianSketch(8),
}
# The codecs that the goal is for.
WITH_GOAL = ("int4", "int4 stochastic", "int8", "int8 stochastic", "hadamard-32 + int4")
Row = dict[str, Any]


def failure(error: Exception) -> str:
    """One line that says what went wrong."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def check(name: str, device: torch.device, num_elements: int) -> Row:
    """Encode and decode on the device, and on the CPU (there: by the plain reference), from the same values and seed.

    ok: the device decodes its packet as the CPU does, to 1e-6 of the largest value, and loses as much as the CPU does,
    to 1%. Compiled kernels may contract a product and a sum, so a code on a border may differ; how many bytes do is
    said.
    """
    codec = CODECS[name]
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    row: Row = {"codec": name, "backend": codec.backend(device)}
    try:
        packet = codec.encode(x.to(device), seed=1)
        here = codec.decode(packet, num_elements).cpu()
        summed = codec.decode_add(packet, x.to(device, copy=True)).cpu()
        with patch.object(backends, "cpu_kernels", backends.cpu_kernels if device.type == "cuda" else lambda: None):
            reference = codec.encode(x, seed=1)
            there = codec.decode(packet.cpu(), num_elements)
            expected = (codec.decode(reference, num_elements) - x).norm()
        differ = int((packet.cpu() != reference).sum())
        largest = float(there.abs().max())
        off = max(
            float((here - there).abs().max()), float((summed - x - there).abs().max()) - 4e-7 * float(x.abs().max())
        )
        lost = float((there - x).norm())
        is_right = off <= 1e-6 * largest and abs(lost - float(expected)) <= 0.01 * float(expected)
        found = "same bits" if not differ else f"{differ} of {packet.numel()} packet bytes differ"
        return row | {"ok": is_right, "found": f"{found}, decoded to within {off / max(largest, 1e-30):.0e}"}
    except Exception as error:
        return row | {"ok": False, "found": failure(error)}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, on the device's clock."""
    if device.type == "cpu":
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def calls(name: str, x: Tensor, total: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a codec, over buffers that were allocated and touched before."""
    codec = CODECS[name]
    warm([codec], x.device)
    packet = codec.encode(x, seed=1)
    return {
        f"{name}: encode": lambda: codec.encode(x, seed=1, out=packet),
        f"{name}: decode": lambda: codec.decode(packet, x.numel(), out=total),
        f"{name}: decode and add": lambda: codec.decode_add(packet, total),
    }


def measure(name: str, x: Tensor, total: Tensor, rounds: int) -> list[Row]:
    """Each call's median seconds and median ratio to the copy just before it, after two rounds that do not count."""
    try:
        rows = []
        for what, call in calls(name, x, total).items():
            pairs = [(seconds(lambda: total.copy_(x), x.device), seconds(call, x.device)) for _ in range(rounds + 2)]
            ratio = statistics.median(copy_s / call_s for copy_s, call_s in pairs[2:])
            rate = 4 * x.numel() / statistics.median(call_s for _, call_s in pairs[2:]) / 1e9
            # Of the rotated codecs for the encoding alone, and for GPUs: benchmarks/codecs.py is for the CPU.
            has_goal = x.is_cuda and name in WITH_GOAL and not (name.startswith("hadamard") and "decode" in what)
            rows.append({"call": what, "gb_per_s": rate, "ratio": ratio, "goal": GOAL if has_goal else None})
        return rows
    except Exception as error:
        return [{"call": name, "ratio": None, "goal": None, "reason": failure(error)}]


def train(strategy_name: str, device: torch.device, rank: int) -> tuple[float, float, float]:
    """(loss after the last step, median seconds of a step, bytes this rank sends in one), of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, sharded = apply(
        strategy_named(strategy_name),
        model,
        optimizer,
        local_size=1,
        seed=0,
        timeout_s=TIMEOUT_S,
        checked=False,
        overlap=True,
    )
    x = torch.randn(STEPS, 8, 256, generator=torch.Generator().manual_seed(1 + rank)).to(device)
    spent = []
    for step in range(STEPS):
        start_s = time.perf_counter()
        loss = (wrapped(x[step]) - x[step]).square().mean()
        loss.backward()
        sharded.note_loss(float(loss))
        sharded.clip_grad_norm_(1.0)
        sharded.step()
        sharded.zero_grad()
        sharded.synchronize()
        spent.append(time.perf_counter() - start_s)
    sharded.check_replicas()
    mean_loss = sharded.mean_loss
    sent_bytes = float(sharded.bytes_per_step)
    sharded.close()
    return mean_loss, statistics.median(spent[NUM_SETTLING:]), sent_bytes


def worker(rank: int, names: list[str], device_name: str, store: str, pipe: Connection) -> None:
    """Train with each strategy and send its row, until one fails: then the ranks no longer agree on what comes next."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE="1")
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=TIMEOUT_S)
    )
    for name in names:
        row: Row = {"strategy": name}
        try:
            loss, step_s, sent_bytes = train(name, device, rank)
            expected = loss if device.type == "cpu" else train(name, torch.device("cpu"), rank)[0]
            off = abs(loss - expected) / expected
            row |= {"ok": math.isfinite(loss) and off < 0.01, "step_s": step_s, "sent_bytes": sent_bytes}
            row |= {"found": f"loss {loss:.4f}" + ("" if device.type == "cpu" else f", {off:.1e} from the CPU's")}
        except Exception as error:
            row |= {"ok": False, "found": failure(error)}
        pipe.send(row)
        if not row["ok"]:
            break
    pipe.close()
    # A process whose peer failed must not wait for it in torch's own end.
    os._exit(0)


def train_all(names: list[str], device: torch.device) -> list[Row]:
    """One row a strategy; after one that fails, the others go on in new processes."""
    context, rows, left = multiprocessing.get_context("spawn"), [], list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(WORLD_SIZE):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, left, str(device), str(Path(folder) / "store"), theirs)
                process = context.Process(target=worker, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            done = receive(pipes, left)
            for process in processes:
                process.join(0 if any(not row["ok"] for row in done) else TIMEOUT_S)
                process.kill()
        rows += done
        left = left[len(done) :]
    return rows


def receive(pipes: list[Connection], names: list[str]) -> list[Row]:
    """The ranks' rows, one of both for each strategy; ends with the first that failed on any of them."""
    rows: list[Row] = []
    for name in names:
        both: list[Row] = []
        for rank, pipe in enumerate(pipes):
            try:
                # A first step compiles; a rank whose peer is gone notices after its timeout.
                arrived = pipe.poll(5 * TIMEOUT_S)
                both.append(pipe.recv() if arrived else {"strategy": name, "ok": False, "found": "no answer"})
            except EOFError:
                both.append({"strategy": name, "ok": False, "found": f"rank {rank} died without a word"})
        rows.append(next((row for row in both if not row["ok"]), both[0]))
        if not rows[-1]["ok"]:
            break
    return rows


def sessions(device: torch.device, is_quick: bool) -> list[Row]:
    """One row for each session of `thinwire train`: on the device, on the CPU from there, back, and compiled."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "data.txt"
        text.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(3000)))
        first = [
            "--data",
            str(text),
            "--model",
            "tiny",
            "--seq-len",
            "64",
            "--micro-batch",
            "2",
            "--sample-tokens",
            "4",
        ]
        plan = [("on the device", device.type, [*first, "--steps", "9", "--stop-at", "3"])]
        if not is_quick:
            plan += [("goes on on the CPU", "cpu", ["--resume", "--stop-at", "6"])]
            plan += [("goes on on the device", device.type, ["--resume"])]
        if device.type == "cuda":
            plan += [("compiled", "cuda", [*first, "--steps", "9", "--overwrite", "--compile"])]
        for what, kind, flags in plan:
            run_dir = str(Path(folder) / "run")
            command = [sys.executable, "-m", "thinwire", "train", *flags, "--device", kind, "--run-dir", run_dir]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10 * TIMEOUT_S)
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            row: Row = {"session": what, "ok": done.returncode == 0, "found": " ".join(said)[:160]}
            if row["ok"]:
                summary = json.loads((Path(run_dir) / "summary.json").read_text())
                row |= {"step_s": summary["step_s"], "peak_allocated_bytes": summary["peak_allocated_bytes"]}
                row["found"] = f"{summary['device']}, {summary['dtype']}, {summary['steps']} steps"
            rows.append(row)
    return rows


def what_runs(device: torch.device) -> dict[str, str]:
    """The device and the versions."""
    here = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "python": platform.python_version()}
    here["torch"] = str(torch.__version__)
    if device.type == "cpu":
        return {"device": "no GPU found: this is the CPU half", **here}
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "missing: torch.compile has no backend"
    seen = torch.cuda.get_device_properties(device)
    name = f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, compute capability {seen.major}.{seen.minor}"
    return {"device": name, "cuda": str(torch.version.cuda), "triton": triton, **here}


def show(checks: list[Row], timings: list[Row], trained: list[Row], ran: list[Row]) -> None:
    print(f"\n{'codec':32s} {'runs as':16s} {'':6s} found")
    for row in checks:
        print(f"{row['codec']:32s} {row['backend']:16s} {'ok' if row['ok'] else 'WRONG':6s} {row['found']}")
    print(f"\n{'call':44s} {'GB/s of fp32':>13s} {'x copy':>7s} {'goal':>5s}")
    for row in timings:
        if row["ratio"] is None:
            print(f"{row['call']:44s} {row['reason']}")
            continue
        verdict = "" if row["goal"] is None else f"{GOAL:5.2f} {'reached' if row['ratio'] >= GOAL else 'missed'}"
        print(f"{row['call']:44s} {row['gb_per_s']:13.1f} {row['ratio']:7.2f} {verdict}".rstrip())
    print(f"\n{'strategy, 2 processes over gloo':36s} {'ms a step':>10s} {'kB sent':>9s}")
    for row in trained:
        cost = f"{1e3 * row['step_s']:10.1f} {row['sent_bytes'] / 1e3:9.1f}" if "step_s" in row else " " * 20
        print(f"{row['strategy']:36s} {cost} {'ok' if row['ok'] else 'WRONG':6s} {row['found']}")
    print(f"\n{'thinwire train':36s} {'ms a step':>10s} {'MB on it':>9s}")
    for row in ran:
        cost = f"{1e3 * row['step_s']:10.1f} {row['peak_allocated_bytes'] / 1e6:9.1f}" if row["ok"] else " " * 20
        print(f"{row['session']:36s} {cost} {'ok' if row['ok'] else 'WRONG':6s} {row['found']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 MiB, 3 rounds and three strategies")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    here = what_runs(device)
    print("\n".join(f"{key:8s} {value}" for key, value in here.items()))
    if device.type == "cpu":
        torch.set_num_threads(1)
    num_elements, rounds = (1 << 18, 3) if args.quick else (1 << (26 if device.type == "cuda" else 22), 21)
    checks = [check(name, device, 1 << 18) for name in CODECS]
    x, total = torch.randn(num_elements, device=device), torch.zeros(num_elements, device=device)
    timings = [row for name in CODECS for row in measure(name, x, total, rounds)]
    trained = train_all(["zero", "sdp4bit", "fsdp-bf16"] if args.quick else list(STRATEGIES), device)
    ran = sessions(device, args.quick)
    show(checks, timings, trained, ran)
    if args.json:
        readme = [
            [f"{row['call']}, fp32 bytes over a device copy's", f"{row['ratio']:.2f}"]
            for row in timings
            if device.type == "cuda" and row["goal"] and row["ratio"]
        ]
        result = {
            "command": "python benchmarks/gpu.py",
            "machine": f"{here['device']}, torch {here['torch']}",
            "what_ran": here,
            "num_elements": num_elements,
            "checks": checks,
            "timings": timings,
            "strategies": trained,
            "sessions": ran,
            "readme": readme,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
