"""Which ranks a strategy takes for those of one node: a part of a machine, a machine, or several machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from thinwire.errors import ConfigError
from thinwire.planner.candidates import Candidate
from thinwire.planner.order import RankOrder
from thinwire.planner.pricing import WORD, Pricing


def with_groups(listed: Sequence[Candidate], pricing: Pricing) -> Iterator[Candidate]:
    """Yield all candidates, and then each of them again with every other number of ranks in a group.

    Between groups a rank sends to the one at its own place alone, so that a bad link may carry nothing.
    """
    yield from listed
    for way in listed:
        for size in other_groups(pricing, way):
            yield replace(way, group=size)


def other_groups(pricing: Pricing, way: Candidate) -> tuple[int, ...]:
    """Numbers of ranks that a candidate's strategy may take for one node, besides those of a machine.

    A group is a part of a machine, or several machines. Left out are groups in which a rank sends every other one as
    much as in those before, and rings, which know no groups. Ranks that share sequences or experts count machines.
    """
    local = machine_ranks(pricing, way)
    if way.outer or way.sequence * way.experts > 1 or way.sharing == 1 or way.sharing % local:
        return ()
    key = (way.strategy, way.sharing, way.tensor)
    if key not in pricing.groups:
        found = dict[tuple[float, ...], int]()
        with suppress(ConfigError):
            if not pricing.is_ring(way):
                found[shares(pricing, way)] = 0
        for size in range(1, way.sharing + 1) if found else ():
            if size != local and way.sharing % size == 0 and (local % size == 0 or size % local == 0):
                # What a strategy can't do in them is no candidate.
                with suppress(ConfigError):
                    found.setdefault(shares(pricing, replace(way, group=size * way.tensor)), size * way.tensor)
        pricing.groups[key] = tuple(filter(None, found.values()))
    return pricing.groups[key]


def machine_ranks(pricing: Pricing, way: Candidate) -> int:
    """How many of the ranks that the strategy joins lie on one machine."""
    return min(pricing.machine.local_size // way.tensor, way.sharing)


def shares(pricing: Pricing, way: Candidate) -> tuple[float, ...]:
    """Bytes of a micro-batch's step that a rank sends to each other rank, in their order, without its word on it."""
    grid = pricing.replicas(way)
    sent = pricing.plan_of(replace(way, num_micro_batches=1), pricing.cut(way.tensor)).sent
    told = {key: num_bytes for key, num_bytes in sent.items() if key[0] != WORD}
    between = sum(num_bytes for (_, level), num_bytes in told.items() if level == "inter")
    inside = sum(told.values()) - between
    return tuple(
        inside / (grid.local_size - 1) if grid.node(rank) == 0
        else between / (grid.num_nodes - 1) if grid.local_rank(rank) == 0
        else 0.0
        for rank in range(1, grid.world_size)
    )  # fmt: skip


def to_each(pricing: Pricing, way: Candidate) -> tuple[float, float]:
    """Bytes of a step that a rank sends to each other one of its group, and to the one at its place in each other."""
    plan, grid = pricing.plan_of(way, pricing.cut(way.tensor)), pricing.replicas(way)
    inside = plan.sent_on("intra") + plan.sent_on("pair")
    return inside / max(1, grid.local_size - 1), plan.sent_on("inter") / max(1, grid.num_nodes - 1)


def crossing_bytes(pricing: Pricing, way: Candidate) -> tuple[float, float]:
    """Bytes of a step that a rank sends to other machines, and the most of them to one rank."""
    (inside, between), grid = to_each(pricing, way), pricing.replicas(way)
    size, local = grid.local_size, machine_ranks(pricing, way)
    if size > local:
        return between * (grid.num_nodes - 1) + inside * (size - local), max(inside, between)
    crossing = between * (way.sharing - local) / size
    return crossing, between if crossing else 0.0


def cost_of_groups(pricing: Pricing, way: Candidate) -> Callable[[RankOrder], float] | None:
    """The seconds of the slowest links inside and between groups, as a function of the order of machines.

    None where no group is several machines: then all machines send to all others, in any order.
    """
    local, fabric = pricing.machine.local_size, pricing.machine.fabric
    num = way.group // local
    if num < 2:
        return None
    inside, between = to_each(pricing, way)
    firsts = range(0, pricing.machine.num_ranks, local)
    byte_s = np.array([[0.0 if a == b else 1 / fabric.rates[a][b] for b in firsts] for a in firsts])
    place = np.arange(len(firsts))
    alike = place[:, None] // num == place // num
    across = (place[:, None] % num == place % num) & ~alike

    def cost(nodes: RankOrder) -> float:
        seconds = byte_s[np.ix_(nodes, nodes)]
        return float(inside * seconds[alike].max() + between * seconds[across].max(initial=0.0))

    return cost
