"""Measures the links between ranks: each alone, in both directions, then all at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from thinwire.collectives import Communicator
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.cost import Network, Traffic

# Long enough that the buffers of a link, which swallow the first part at once, do not decide.
PROBE_S, SMALLEST_BYTES, LARGEST_BYTES = 0.1, 1 << 14, 1 << 24
# So long no byte is sent before a probe: the buckets that limit rates have filled again.
REST_S = 0.05
# Times that nothing measures, on one machine.
LEAST_S = 1e-6
NUM_PROBES = 2
NUM_SHARED = 4

Pairs = list[tuple[int, int]]


def rounds_of_pairs(num_ranks: int) -> list[Pairs]:
    """All pairs of ranks, each once. No rank is in two pairs of a round: n - 1 rounds for even n, n for odd n."""
    seats: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def bucket_of(num_bytes: float, once_s: float, twice_s: float, delay_s: float) -> tuple[float, float]:
    """Rate and burst of a token bucket through which n bytes pass in once_s seconds and 2 n bytes in twice_s.

    rate = n / (t(2 n) - t(n)), in bytes per second; burst = n / rate - (t(n) - delay), in seconds at that rate. A burst
    only raises the mean rate, so a rate above 2 n / t(2 n) can only be noise of the clock and is cut to it.
    """
    rate = num_bytes / max(LEAST_S, twice_s - once_s, (twice_s - delay_s) / 2)
    return rate, max(0.0, num_bytes / rate - (once_s - delay_s))


def measured_rates(comm: Communicator) -> Network:
    """Rates and delays between all ranks, in both directions, equal on all ranks. A collective.

    In each round, pairs of ranks send to each other in turns. Messages grow until they take PROBE_S. The delay is the
    time of a short message. Rates follow by `bucket_of`; the burst is the median over the links. The faster of two
    probes counts, because other work on a machine only slows them.
    """
    size = comm.world_size
    rates = [[float("inf")] * size for _ in range(size)]
    delays = [[0.0] * size for _ in range(size)]
    bursts = []
    for pairs in rounds_of_pairs(size):
        peer = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        num_bytes = dict.fromkeys(peer, SMALLEST_BYTES)
        shorts = _fastest(comm, peer, dict.fromkeys(peer, 1))
        once: dict[int, float] = {}
        while growing := [rank for rank in peer if rank not in once]:
            took_s = _swap(comm, peer, {rank: num_bytes[rank] if rank in growing else 1 for rank in peer})
            for rank in growing:
                slower_s = max(float(took_s[rank]), float(took_s[peer[rank]]))
                if slower_s > PROBE_S or num_bytes[rank] >= LARGEST_BYTES:
                    once[rank] = float(took_s[rank])
                else:
                    num_bytes[rank] *= 4 if slower_s < PROBE_S / 4 else 2
        again_s = _swap(comm, peer, num_bytes)
        twice_s = _fastest(comm, peer, {rank: 2 * num for rank, num in num_bytes.items()})
        for rank, other in peer.items():
            delay_s = float(shorts[rank])
            rate, burst_s = bucket_of(
                num_bytes[rank], min(once[rank], float(again_s[rank])), float(twice_s[rank]), delay_s
            )
            rates[other][rank], delays[other][rank] = rate, delay_s
            bursts.append(burst_s)
    nodes = tuple(comm.topology.node(rank) for rank in range(size))
    return Network(nodes, _rows(rates), _rows(delays), median(bursts) if bursts else 0.0)


def shared_rates(comm: Communicator, alone: Network) -> tuple[float, float]:
    """The share of the rates that is left while all ranks send to all others, and the bytes a second of a core carries.

    The first result, at most 1, is the time with ports shared fairly, divided by the measured time: the fastest of
    NUM_SHARED, since packets that meet at a slow port may be lost in one and not in the next. The second counts the
    bytes that a rank sends and receives. alone: the result of `measured_rates`. A collective.
    """
    size = comm.world_size
    if size == 1:
        return 1.0, float("inf")
    slowest = min(alone.rates[a][b] for a, b in alone.pairs)
    num_bytes = int(min(LARGEST_BYTES // size, max(SMALLEST_BYTES, slowest * (PROBE_S + alone.burst_s))))
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    told = [_spread_s(comm, own) for _ in range(NUM_SHARED)]
    took_s = min(float(seconds.max()) for seconds, _ in told)
    cpu_s = median(float(seconds.median()) for _, seconds in told)
    traffic: Traffic[int] = Traffic(alone)
    for source, target in alone.pairs:
        traffic.send((source, target), num_bytes, target)
    fair_s = 0.0
    while (at := traffic.next_s()) < float("inf"):
        fair_s = at
        traffic.advance(at)
    carried = 2 * num_bytes * (size - 1) / max(LEAST_S, cpu_s)
    return min(1.0, fair_s / max(LEAST_S, took_s)), carried


def _spread_s(comm: Communicator, packet: Tensor) -> tuple[Tensor, Tensor]:
    """Seconds, and seconds of a core, in which each rank sends a packet to all others: fp64 [world_size] each."""
    time.sleep(REST_S)
    comm.barrier()
    start, start_cpu_s = time.perf_counter(), time.process_time()
    comm.wait(comm.submit(partial(_spread, packet=packet)))
    took_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu_s
    told = comm.wait(comm.all_gather_exact(torch.tensor([took_s, cpu_s], dtype=torch.float64)))
    return told[:, 0], told[:, 1]


def _spread(link: Link, packet: Tensor) -> Rounds[None]:
    """Send a packet to all other ranks, and receive as much from each."""
    size = link.topology.world_size
    others = [(link.rank + step) % size for step in range(1, size)]
    received = link.scratch("probe", size, packet.numel())
    round_ = link.exchange("calibrate", "inter", {peer: received[peer] for peer in others})
    for peer in others:
        round_.send(peer, packet)
    yield from round_.finish()


def _fastest(comm: Communicator, peer: dict[int, int], num_bytes: dict[int, int]) -> Tensor:
    return torch.stack([_swap(comm, peer, num_bytes) for _ in range(NUM_PROBES)]).min(0).values


def _swap(comm: Communicator, peer: dict[int, int], num_bytes: dict[int, int]) -> Tensor:
    """Seconds until each rank has its peer's message, fp64 [world_size]. num_bytes: by receiver."""
    time.sleep(REST_S)
    other, took_s = peer.get(comm.rank), 0.0
    # One way after the other: gloo's word that a receive is posted would stand behind what this rank sends.
    for upwards in (True, False):
        comm.barrier()
        start = time.perf_counter()
        comm.wait(comm.submit(partial(_one_way, peer=peer, num_bytes=num_bytes, upwards=upwards)))
        if other is not None and (other < comm.rank) == upwards:
            took_s = time.perf_counter() - start
    return comm.wait(comm.all_gather_exact(torch.tensor([took_s], dtype=torch.float64))).flatten()


def _one_way(link: Link, peer: dict[int, int], num_bytes: dict[int, int], upwards: bool) -> Rounds[None]:
    """Send a message from the lower to the higher rank of each pair, or the other way."""
    other = peer.get(link.rank)
    if other is None:
        return
    sends = (link.rank < other) == upwards
    if sends:
        round_ = link.exchange("calibrate", "inter", {})
        round_.send(other, torch.zeros(num_bytes[other], dtype=torch.uint8))
    else:
        round_ = link.exchange("calibrate", "inter", {other: link.scratch("probe", num_bytes[link.rank])})
    yield from round_.finish()


def _rows(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, table))
