"""Measures the links between neighbouring stages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from thinwire.calibration.growth import REST_S, bucket_of, common_burst, grown
from thinwire.collectives import Communicator, Expected, Label, Mailbox
from thinwire.cost import Network

# Short messages, of which the fastest is the delay.
NUM_SHORT = 3


def measured_links(comm: Communicator, mailbox: Mailbox, *, all_pairs: bool = False) -> Network:
    """Rates and delays between the ranks of a pipeline, equal on all of them. A collective.

    All ranks send to the next rank at once, the last to the first. Messages grow until each takes PROBE_S longer than a
    short one, the fastest of three, whose time is the delay. Rate follows by `bucket_of`, and the burst by
    `common_burst`. Then all send the other way. Pairs that are no neighbours count as slow as the slowest link.

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
    rates, delays, _ = zip(*found.values(), strict=True)
    nodes, slowest = tuple(mailbox.topology.node(rank) for rank in range(size)), (min(rates), max(delays))

    def table(which: int) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(found[a, b][which] if (a, b) in found else slowest[which] for b in range(size)) for a in range(size)
        )

    bursts = {pair: burst_s for pair, (_, _, burst_s) in found.items()}
    return Network(nodes, table(0), table(1), common_burst(bursts, nodes))


def _links_over(comm: Communicator, mailbox: Mailbox, distance: int) -> list[tuple[float, float, float]]:
    """(rate, delay, burst) of the link to each rank from the one `distance` before it."""
    size = comm.world_size

    def took(sizes: dict[int, int]) -> dict[int, float]:
        return dict(enumerate(_around(comm, mailbox, [sizes[rank] for rank in range(size)], distance).tolist()))

    # The fastest of some, for what else a machine does delays a message, and many together count in a step.
    shorts = [took(dict.fromkeys(range(size), 1)) for _ in range(NUM_SHORT)]
    short_s = {rank: min(each[rank] for each in shorts) for rank in range(size)}
    num_bytes, once_s = grown(took, short_s)
    twice_s = took({rank: 2 * num for rank, num in num_bytes.items()})
    found = []
    for rank, short in short_s.items():
        rate, burst_s = bucket_of(num_bytes[rank], once_s[rank], twice_s[rank], short)
        found.append((rate, short, burst_s))
    return found


def _around(comm: Communicator, mailbox: Mailbox, num_bytes: Sequence[int], distance: int) -> torch.Tensor:
    """Seconds until each rank has a message from the rank `distance` before it, fp64 [world_size].

    num_bytes: of the message to each rank.
    """
    label, size = Label("forward", 0, 0), comm.world_size
    target = (comm.rank + distance) % size
    time.sleep(REST_S)
    comm.barrier()
    mailbox.begin([Expected(label, (comm.rank - distance) % size, num_bytes[comm.rank])])
    start = time.perf_counter()
    mailbox.send(target, label, torch.zeros(num_bytes[target], dtype=torch.uint8))
    mailbox.take(label)
    took_s = time.perf_counter() - start
    mailbox.finish()
    return comm.wait(comm.all_gather_exact(torch.tensor([took_s], dtype=torch.float64))).flatten()
