"""How to gather: gloo's own all_gather against pairwise sends, in one run, interleaved, as a ratio of medians.

    python benchmarks/collectives.py [--world-size 4] [--repeats 15]

Prints, for each message size, seconds of gloo's all_gather, of thinwire's pairwise all_gather, and their ratio (above
1: pairwise is faster). The choice in thinwire/collectives rests on this table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thinwire.collectives import Communicator
from thinwire.collectives.gather import all_gather_packets

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)


def worker(rank: int, world_size: int, repeats: int, store: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    comm = Communicator()
    for num_bytes in SIZES:
        packet = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
        gathered = torch.empty(world_size * num_bytes, dtype=torch.uint8)
        seconds: dict[str, list[float]] = {"gloo": [], "pairwise": []}
        for _ in range(repeats):
            comm.barrier()
            start = time.perf_counter()
            dist.all_gather_into_tensor(gathered, packet)
            seconds["gloo"].append(time.perf_counter() - start)
            comm.barrier()
            start = time.perf_counter()
            comm.submit(partial(all_gather_packets, packet=packet)).result()
            seconds["pairwise"].append(time.perf_counter() - start)
        gloo, pairwise = (statistics.median(times) for times in seconds.values())
        if rank == 0:
            print(f"{num_bytes:>10,} {gloo:>10.5f} {pairwise:>10.5f} {gloo / pairwise:>8.2f}", flush=True)
    comm.close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{arguments.world_size} processes on {os.cpu_count()} cores, torch {torch.__version__}, loopback")
    print(f"{'bytes/rank':>10} {'gloo s':>10} {'pairwise s':>10} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(worker, (arguments.world_size, arguments.repeats, store), nprocs=arguments.world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
