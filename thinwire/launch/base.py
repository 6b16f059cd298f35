"""Measures what a worker has in memory before it has a model: `python -m thinwire.launch.base FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.calibration.process import ProcessMemory, write
from thinwire.codecs import warm
from thinwire.hosts.offload.room import hold_to
from thinwire.launch.apart import apart
from thinwire.launch.fork_server import ForkServer
from thinwire.methods.memory.residency import LEAST_SUB_GROUP
from thinwire.tiers import checksum
from thinwire.tiers.mount import disk_folder

# So small that it hardly counts, but with a matrix and activations that are large enough for the disk.
MODEL, WORDS, LENGTH, STEPS = "tiny", 4096, 512, 3
# No limit, but what belongs to one: small stacks, and freed memory that goes back.
NO_LIMIT = 1 << 50


def main() -> None:
    """Fork a worker as a run does, which trains a few steps alone and writes what it takes."""
    from thinwire.methods.data.sdp4bit import SDP4Bit

    path, *is_worker = sys.argv[1:]
    if is_worker:
        work(Path(path))
        return
    # As before a run: a compiler's memory is none of a worker's.
    apart(lambda: warm(SDP4Bit().codecs))
    apart(checksum.warm)
    with ForkServer("thinwire.launch.preload") as server:
        code = server.start(["thinwire.launch.base", path, "worker"], dict(os.environ)).wait()
    raise SystemExit(code)


def work(path: Path) -> None:
    """Train with all on a disk, which takes threads and memory of its own, then write."""
    import thinwire
    from thinwire.models import build_model

    torch.set_num_threads(1)
    hold_to(NO_LIMIT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build_model(MODEL, WORDS, LENGTH)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    residency = thinwire.Residency(
        store=str(disk_folder()), weights="disk", gradients="disk", optimizer="disk", activations="recompute:disk",
        sub_group=LEAST_SUB_GROUP,
    )  # fmt: skip
    model, optimizer = thinwire.zero(model, inner, thinwire.SDP4Bit(), residency=residency, announce=False)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    for _ in range(STEPS):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    write(path, ProcessMemory.now())
    optimizer.close()
    os._exit(0)


if __name__ == "__main__":
    main()
