"""Measures the links between neighbouring stages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from thinwire.calibration.links import LARGEST_BYTES, PROBE_S, REST_S, SMALLEST_BYTES, bucket_of
from thinwire.collectives import Communicator, Expected, Label, Mailbox
from thinwire.cost import Network


def measured_links(comm: Communicator, mailbox: Mailbox) -> Network:
    """Rates and delays between the ranks of a pipeline, equal on all of them. A collective.

    All ranks send to the next rank at once, the last to the first. Messages grow until the slowest takes PROBE_S. The
    delay is the time of a short message. Rate and burst follow by `bucket_of`; the burst is that of the slowest link.
    The way back is assumed to be as fast, and pairs that are no neighbours as slow as the slowest link.
    """
    if comm.world_size == 1:
        return Network.even(1)
    short_s = took_s = _around(comm, mailbox, 1)
    num_bytes = SMALLEST_BYTES
    while True:
        took_s = _around(comm, mailbox, num_bytes)
        if float(took_s.max()) > PROBE_S or num_bytes >= LARGEST_BYTES:
            break
        num_bytes *= 4
    size = comm.world_size
    twice_s = _around(comm, mailbox, 2 * num_bytes)
    delays = [float(short) for short in short_s]
    probed = zip(took_s.tolist(), twice_s.tolist(), delays, strict=True)
    rates, bursts = zip(*(bucket_of(num_bytes, *times) for times in probed), strict=True)
    nodes = tuple(mailbox.topology.node(rank) for rank in range(size))

    def table(values: Sequence[float], others: float) -> tuple[tuple[float, ...], ...]:
        found = [[others] * size for _ in range(size)]
        for rank, value in enumerate(values):
            # What arrives at a rank comes from the one before.
            found[rank - 1][rank] = found[rank][rank - 1] = value
        return tuple(map(tuple, found))

    return Network(nodes, table(rates, min(rates)), table(delays, max(delays)), min(bursts))


def _around(comm: Communicator, mailbox: Mailbox, num_bytes: int) -> torch.Tensor:
    """Seconds until each rank has a message from the rank before it, fp64 [world_size]."""
    label, size = Label("forward", 0, 0), comm.world_size
    time.sleep(REST_S)
    comm.barrier()
    mailbox.begin([Expected(label, (comm.rank - 1) % size, num_bytes)])
    start = time.perf_counter()
    mailbox.send((comm.rank + 1) % size, label, torch.zeros(num_bytes, dtype=torch.uint8))
    mailbox.take(label)
    took_s = time.perf_counter() - start
    mailbox.finish()
    return comm.wait(comm.all_gather_exact(torch.tensor([took_s], dtype=torch.float64))).flatten()
