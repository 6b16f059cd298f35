"""What this machine has, and what is fastest on it: cores, memory, compute dtype."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from thinwire.report.machine import num_cores

# Below this gain the measurement's noise decides, and fp32 is the safer choice.
WORTHWHILE = 1.1


def threads_per_worker(num_workers: int) -> tuple[int, str]:
    """Compute threads of one worker, and why: OMP_NUM_THREADS where it is set, else an equal share of the cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdigit() and int(stated) > 0:
        return int(stated), "OMP_NUM_THREADS is set"
    return max(1, num_cores() // num_workers), f"{num_cores()} cores shared by {num_workers} worker(s)"


def bf16_speedup(threads: int, repeats: int = 5) -> float:
    """Seconds of a small feed-forward block, forward and backward, in fp32 over those under bf16 autocast."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        block = nn.Sequential(nn.Linear(512, 1536), nn.SiLU(), nn.Linear(1536, 512))
        x = torch.randn(512, 512)
        seconds: dict[bool, float] = {}
        for _ in range(repeats):
            for bf16 in (False, True):
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = block(x).float().square().mean()
                loss.backward()
                seconds[bf16] = min(seconds.get(bf16, float("inf")), time.perf_counter() - start)
        return seconds[False] / seconds[True]
    finally:
        torch.set_num_threads(before)


def choose_dtype(asked: str, threads: int) -> tuple[str, str]:
    """The compute dtype, "bf16" or "fp32", and why."""
    if asked != "auto":
        return asked, ""
    speedup = bf16_speedup(threads)
    chosen = "bf16" if speedup >= WORTHWHILE else "fp32"
    return chosen, f"bf16 autocast measured {speedup:.2f} times as fast as fp32 here"


def peak_rss_bytes() -> int:
    """The most memory that this process has held at once (VmHWM); elsewhere than on Linux, what getrusage says."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def max_over_ranks(value: int) -> int:
    """The largest of the ranks' numbers; a collective on the default group."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
