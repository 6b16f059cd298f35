"""Measures the links between neighbouring stages."""

from __future__ import annotations

import time

import torch

from thinwire.calibration.links import LARGEST_BYTES, PROBE_S, REST_S, SMALLEST_BYTES, bucket_of
from thinwire.collectives import Communicator, Expected, Label, Mailbox
from thinwire.cost import Network

# Short messages, of which the fastest is the delay.
NUM_SHORT = 3


def measured_links(comm: Communicator, mailbox: Mailbox, *, all_pairs: bool = False) -> Network:
    """Rates and delays between the ranks of a pipeline, equal on all of them. A collective.

    All ranks send to the next rank at once, the last to the first. Messages grow until the slowest takes PROBE_S. The
    delay is the time of a short message, the fastest of three. Rate and burst follow by `bucket_of`; the burst is that
    of the slowest link. Then all send the other way. Pairs that are no neighbours count as slow as the slowest link.

    all_pairs: then all send to the next rank but one, and so on, until all pairs are known.
    """
    size = comm.world_size
    if size == 1:
        return Network.even(1)
    # {(from, to): (rate, delay, burst)}
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for distance in range(1, size) if all_pairs else sorted({1, size - 1}):
        for rank, link in enumerate(_links_over(comm, mailbox, distance)):
            # What arrives at a rank comes from the one so far before.
            found[(rank - distance) % size, rank] = link
    rates, delays, bursts = zip(*found.values(), strict=True)
    nodes, slowest = tuple(mailbox.topology.node(rank) for rank in range(size)), (min(rates), max(delays))

    def table(which: int) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(found[a, b][which] if (a, b) in found else slowest[which] for b in range(size)) for a in range(size)
        )

    return Network(nodes, table(0), table(1), min(bursts))


def _links_over(comm: Communicator, mailbox: Mailbox, distance: int) -> list[tuple[float, float, float]]:
    """(rate, delay, burst) of the link to each rank from the one `distance` before it."""
    # The fastest of some, for what else a machine does delays a message, and many together count in a step.
    short_s = torch.stack([_around(comm, mailbox, 1, distance) for _ in range(NUM_SHORT)]).amin(0)
    num_bytes = SMALLEST_BYTES
    while True:
        took_s = _around(comm, mailbox, num_bytes, distance)
        if float(took_s.max()) > PROBE_S or num_bytes >= LARGEST_BYTES:
            break
        num_bytes *= 4
    twice_s = _around(comm, mailbox, 2 * num_bytes, distance)
    probed = zip(took_s.tolist(), twice_s.tolist(), short_s.tolist(), strict=True)
    links = ((bucket_of(num_bytes, took, twice, short), short) for took, twice, short in probed)
    return [(rate, short, burst) for (rate, burst), short in links]


def _around(comm: Communicator, mailbox: Mailbox, num_bytes: int, distance: int) -> torch.Tensor:
    """Seconds until each rank has a message from the rank `distance` before it, fp64 [world_size]."""
    label, size = Label("forward", 0, 0), comm.world_size
    time.sleep(REST_S)
    comm.barrier()
    mailbox.begin([Expected(label, (comm.rank - distance) % size, num_bytes)])
    start = time.perf_counter()
    mailbox.send((comm.rank + distance) % size, label, torch.zeros(num_bytes, dtype=torch.uint8))
    mailbox.take(label)
    took_s = time.perf_counter() - start
    mailbox.finish()
    return comm.wait(comm.all_gather_exact(torch.tensor([took_s], dtype=torch.float64))).flatten()
