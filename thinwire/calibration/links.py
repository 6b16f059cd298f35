"""Measures the links between ranks: each alone, in both directions, then all at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from thinwire.calibration.growth import (
    LARGEST_BYTES,
    LEAST_S,
    PROBE_S,
    REST_S,
    SMALLEST_BYTES,
    bucket_of,
    common_burst,
    grown,
)
from thinwire.collectives import Communicator, Topology
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.cost import Network, Traffic

NUM_PROBES = 2
NUM_SHARED, NUM_ALONE = 4, 3

Pairs = list[tuple[int, int]]
Table = tuple[tuple[float, ...], ...]


def rounds_of_pairs(num: int, wanted: Collection[tuple[int, int]] | None = None) -> list[Pairs]:
    """All pairs of numbers below `num`, each once, in rounds in which none is in two pairs.

    There are num - 1 rounds for an even number, num for an odd one. wanted: the pairs that count, (lower, higher), in
    as few rounds as the first that fits gives.
    """
    seats: list[int | None] = [*range(num), *([None] if num % 2 else [])]
    rounds: list[tuple[Pairs, set[int]]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        for a, b in zip(seats[:half], reversed(seats[half:]), strict=True):
            if a is None or b is None:
                continue
            pair = (min(a, b), max(a, b))
            if wanted is not None and pair not in wanted:
                continue
            place = next((each for each in rounds if each[1].isdisjoint(pair)), None)
            if place is None:
                rounds.append(place := ([], set()))
            place[0].append(pair)
            place[1].update(pair)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs, _ in rounds]


def rounds_on(grid: Topology, wanted: Collection[tuple[int, int]] | None = None) -> Iterator[Pairs]:
    """Yield rounds of pairs of ranks that don't share a link: first ranks of two nodes, then ranks inside nodes.

    Ranks of a node share its link, so no node is in two pairs of a round, and one pair stands for all between two
    nodes. wanted: pairs of ranks, of which at least one must be on the way; None: all.
    """
    num, local = grid.num_nodes, grid.local_size
    nodes = None
    if wanted is not None:
        between = {(grid.node(a), grid.node(b)) for a, b in wanted}
        nodes = {(min(pair), max(pair)) for pair in between if pair[0] != pair[1]}
    for pairs in rounds_of_pairs(num, nodes):
        yield [(grid.rank(a, 0), grid.rank(b, 0)) for a, b in pairs]
    for pairs in rounds_of_pairs(local):
        inside = [(grid.rank(node, a), grid.rank(node, b)) for node in range(num) for a, b in pairs]
        if left := [pair for pair in inside if wanted is None or pair in wanted or pair[::-1] in wanted]:
            yield left


def measured_rates(
    comm: Communicator, wanted: Collection[tuple[int, int]] | None = None, grid: Topology | None = None
) -> Network:
    """Rates and delays between the ranks, in both directions, equal on all ranks. A collective; see `probed`."""
    return probed(comm, wanted, grid)[0]


def probed(
    comm: Communicator, wanted: Collection[tuple[int, int]] | None = None, grid: Topology | None = None
) -> tuple[Network, Table]:
    """Rates and delays between the ranks, in both directions, and how much they scatter, equal on all ranks.

    In each round, pairs of ranks that share no link send to each other in turns. Messages grow until they take PROBE_S
    longer than a short one, whose time is the delay. Rates follow by `bucket_of`, and the burst by `common_burst`.
    The faster of two probes counts, because other work on a machine only slows them. The scatter of a link is
    what its slower probe of the longest message took beyond the faster one, as a share of it. A collective.

    Args:
        wanted: pairs of ranks whose links are measured, the same on all ranks; others are without limit. None: all.
        grid: the machines whose ranks share a link, which may be others than the groups of `comm`; None: these.
    """
    size, grid = comm.world_size, grid or comm.topology
    rates, delays, scatter = ([[each] * size for _ in range(size)] for each in (float("inf"), 0.0, 0.0))
    bursts = dict[tuple[int, int], float]()
    for pairs in rounds_on(grid, wanted):
        peer = {a: b for pair in pairs for a, b in (pair, pair[::-1])}

        def took(sizes: dict[int, int], peer: dict[int, int] = peer) -> dict[int, float]:
            seconds = _swap(comm, peer, sizes)
            return {rank: float(seconds[rank]) for rank in peer}

        shorts = _repeated(comm, peer, dict.fromkeys(peer, 1)).amin(0)
        num_bytes, once = grown(took, {rank: float(shorts[rank]) for rank in peer})
        twice_s = _repeated(comm, peer, {rank: 2 * num for rank, num in num_bytes.items()})
        for rank, other in peer.items():
            delay_s, fastest_s = float(shorts[rank]), float(twice_s[:, rank].min())
            rate, burst_s = bucket_of(num_bytes[rank], once[rank], fastest_s, delay_s)
            bursts[other, rank] = burst_s
            for source, target in _stands_for(grid, other, rank):
                rates[source][target], delays[source][target] = rate, delay_s
                scatter[source][target] = float(twice_s[:, rank].max()) / max(LEAST_S, fastest_s) - 1
    nodes = tuple(grid.node(rank) for rank in range(size))
    network = Network(nodes, _rows(rates), _rows(delays), common_burst(bursts, nodes))
    return network, _rows(scatter)


def _stands_for(grid: Topology, source: int, target: int) -> Iterator[tuple[int, int]]:
    """The pairs of ranks whose messages take the same link: one between two nodes stands for all between these."""
    a, b = grid.node(source), grid.node(target)
    if a == b:
        yield source, target
        return
    for one, other in itertools.product(range(grid.local_size), repeat=2):
        yield grid.rank(a, one), grid.rank(b, other)


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
    # As many messages share a node's link; together they take as long as NUM_ALONE that are probed alone.
    sharing = max(NUM_ALONE, comm.topology.local_size**2 * (comm.topology.num_nodes - 1))
    each = NUM_ALONE / sharing * slowest * (PROBE_S + alone.burst_s)
    num_bytes = int(min(LARGEST_BYTES // size, max(SMALLEST_BYTES, each)))
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


def _repeated(comm: Communicator, peer: dict[int, int], num_bytes: dict[int, int]) -> Tensor:
    """Seconds of each probe, fp64 [NUM_PROBES, world_size]."""
    return torch.stack([_swap(comm, peer, num_bytes) for _ in range(NUM_PROBES)])


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


def _rows(table: Sequence[Sequence[float]]) -> Table:
    return tuple(map(tuple, table))
