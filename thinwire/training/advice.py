"""Tells at the start whether the link is slow enough for compression to pay, from a measurement and an estimate."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from thinwire.calibration import step_flops
from thinwire.calibration.growth import REST_S, bucket_of, grown
from thinwire.calibration.reach import all_on_this_machine
from thinwire.collectives import Communicator
from thinwire.device import Device
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.report.units import bytes_text, seconds_text
from thinwire.table import Row

ALTERNATIVE = "zero-bf16"


def link_rate(comm: Communicator) -> float:
    """Bits per second that the slowest rank can send to all other nodes while every rank sends. A collective.

    Messages grow as in `thinwire.calibration.links.probed`, and the rate follows likewise.
    """
    peers = comm.topology.num_nodes - 1

    def probe(sizes: dict[str, int]) -> dict[str, float]:
        return {name: _gather_s(comm, max(1, num_bytes // peers)) for name, num_bytes in sizes.items()}

    short_s = probe({"all": 1})
    sizes, once_s = grown(probe, short_s)
    num_bytes = sizes["all"] // peers * peers
    twice_s = probe({"all": 2 * num_bytes})["all"]
    return 8 * bucket_of(num_bytes, once_s["all"], twice_s, short_s["all"])[0]


def _gather_s(comm: Communicator, num_bytes: int) -> float:
    """Seconds in which the slowest rank has such a message of every rank."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    time.sleep(REST_S)
    comm.barrier()
    start = time.perf_counter()
    comm.wait(comm.all_gather_exact(message))
    took_s = time.perf_counter() - start
    return float(comm.wait(comm.all_gather_exact(torch.tensor([took_s], dtype=torch.float64))).max())


def advise(
    optimizer: ParallelOptimizer,
    strategy: str,
    num_parameters: int,
    tokens_per_rank: int,
    dtype: torch.dtype,
    device: Device,
    rate: float | None = None,
    flops: float | None = None,
) -> Iterator[Row]:
    """Rows about the link, and about whether 16 bits would be enough. A collective over all ranks.

    16 bits both ways take link_s = 8 * 4 N (Y-1)/Y / rate on the link of one of Y nodes. Computing takes about
    compute_s = 6 N tokens / `step_flops`. If link_s <= compute_s, computing hides the messages, and
    compression gains nothing. Between processes of one machine the link is loopback, whose rate depends on the
    machine's load: it is not measured.

    rate, flops: see `link_rate` and `step_flops`; None: measured here.
    """
    grid = optimizer.comm.topology
    if grid.num_nodes == 1:
        return
    # The ranks need not be alike, and all of them must measure, or none.
    if optimizer.all_mean(all_on_this_machine(grid.world_size)) == 1.0:
        yield "link between nodes", "not measured", "this machine's loopback, no network: compression is not judged"
        return
    rate = link_rate(optimizer.comm) if rate is None else rate
    yield "link between nodes", f"{rate / 1e6:.3g} Mbit/s", "each rank's share, measured while all ranks send"
    half_bytes = 4 * num_parameters * (grid.num_nodes - 1) / grid.num_nodes / grid.local_size
    if optimizer.bytes_per_step > 0.9 * half_bytes:
        return
    link_s = 8 * half_bytes / rate
    compute_s = 6 * num_parameters * tokens_per_rank / (step_flops(dtype, device) if flops is None else flops)
    compute_s = optimizer.all_mean(compute_s)
    if link_s > compute_s:
        verdict = "pays on this link"
    else:
        verdict = f"gains nothing here: take --strategy {ALTERNATIVE}"
    yield (
        f"compression by {strategy}",
        verdict,
        f"at 16 bits an element a step sends {bytes_text(half_bytes)}, which take {seconds_text(link_s)}; "
        f"computing takes about {seconds_text(compute_s)} and can go on meanwhile",
    )
