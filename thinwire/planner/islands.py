"""Prices islands: each trains as any candidate does, and they exchange whole weights once in many steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from thinwire.collectives import Topology
from thinwire.cost import Work, simulate
from thinwire.errors import ConfigError
from thinwire.methods.outer.base import IslandsMethod
from thinwire.methods.outer.exchange import OPERATION
from thinwire.methods.pipeline.inside import check_inside
from thinwire.methods.pipeline.options import check_stages
from thinwire.methods.schedule import END, Hop, PlannedExchange, PlannedExchanges, draw
from thinwire.planner.candidates import Candidate
from thinwire.planner.optimizers import ADAMW
from thinwire.planner.parts import cut_parts
from thinwire.planner.prices import price_one
from thinwire.planner.pricing import Pricing
from thinwire.planner.rough import rough_s
from thinwire.planner.search import Priced
from thinwire.registry import check_on_mesh

Pairs = dict[tuple[int, int], float]


def price(pricing: Pricing, way: Candidate) -> Priced:
    """Simulate a candidate. Raises ConfigError for one that can't run."""
    return price_islands(pricing, way) if way.outer else price_one(pricing, way)


def islands_of(pricing: Pricing, way: Candidate) -> list[range]:
    """The ranks of each island."""
    size = pricing.machine.num_ranks // way.islands
    return [range(first, first + size) for first in range(0, pricing.machine.num_ranks, size)]


def around(pricing: Pricing, way: Candidate) -> IslandsMethod:
    """The method of the islands around their strategy. Raises ConfigError for a strategy that can't be inside."""
    outer = pricing.methods[way.outer]
    assert isinstance(outer, IslandsMethod)
    method = replace(outer, inner=pricing.methods[way.strategy])
    if way.stages > 1:
        check_stages(
            way.pipeline, way.stages, len(pricing.model.model.layers), features=pricing.model.config.hidden_size
        )
        check_inside(method, way.replicas)
    if way.tensor > 1:
        check_on_mesh(method)
    return method


def price_islands(pricing: Pricing, way: Candidate) -> Priced:
    """The costs of a step: of the slowest island, and a step's share of the islands' exchange, which nothing hides.

    Memory is that of an island's first rank, which keeps what the islands exchange. Raises ConfigError for what can't
    run.
    """
    method = around(pricing, way)
    if method.climb is not None:
        raise ConfigError(f"ascent of {way.outer}: its second pass has no price; leave it out")
    # No other is stated: islands are planned for what their method trains by.
    optimizer = method.optimizers[0] if pricing.optimizer == ADAMW else pricing.optimizer
    slowest = max(
        (price_one(pricing.on(ranks, optimizer), way.inside) for ranks in islands_of(pricing, way)),
        key=lambda each: each.step_s,
    )
    sent = spread(pricing, way, method)
    exchange_s = outer_s(pricing, way, method, sent)
    kept = method.outer().state(method.fragments(pricing.model)).kept_bytes()
    counted = slowest.counted
    assert counted is not None
    counted = replace(counted, counted_bytes=counted.counted_bytes + sum(kept.values()))
    memory = pricing.estimator.peak_bytes(counted)
    step_s = slowest.step_s + exchange_s
    terms = {**slowest.terms, "step_s": step_s, "peak_rss_bytes": memory}
    terms["exposed_comm_s"] += exchange_s
    terms["sent_bytes"] += sum(sent.values())
    order = tuple(range(pricing.machine.num_ranks))
    return replace(
        slowest, candidate=way, step_s=step_s, memory_bytes=memory, link_s=min(slowest.link_s + exchange_s, step_s),
        order=order, terms=terms, counted=counted,
    )  # fmt: skip


def spread(pricing: Pricing, way: Candidate, method: IslandsMethod) -> dict[tuple[str, str], int]:
    """Bytes that an island's first rank sends for the exchange in a step, by operation and level."""
    size, chunks = pricing.machine.num_ranks // way.islands, way.pipeline.num_chunks(way.stages)
    key = (way.outer, way.strategy, way.islands, way.tensor, way.stages, chunks)
    if key not in pricing.spreads:
        part, widths = pricing.cut(way.tensor), list[int]()
        if way.stages > 1:
            parts, _ = cut_parts(part, way.pipeline, way.stages, pricing.seq_len, way.tensor)
            widths = [sum(param.numel() for param in each.parameters()) * way.tensor for each in parts]
        topology = Topology(way.islands, size)
        pricing.spreads[key] = method.spread(part, pricing.model, topology, way.tensor, widths)
    return pricing.spreads[key]


def outer_s(pricing: Pricing, way: Candidate, method: IslandsMethod, sent: dict[tuple[str, str], int]) -> float:
    """Seconds of an exchange in a step: of the simulated messages between islands, and of those inside, in turn."""
    # Their islands' other ranks wait meanwhile.
    firsts = pricing.machine.part([ranks[0] for ranks in islands_of(pricing, way)], alone=True)
    every = method.exchanges_every
    exchange = PlannedExchange(OPERATION, END, (Hop("inter", sent[OPERATION, "inter"] * every),))
    between = PlannedExchanges((1.0,), (exchange,))
    graph = draw(between, Topology(way.islands, 1), 1, Work(pricing.layer, 0.0))
    return simulate(graph, firsts).makespan_s / every + inside_s(pricing, way, sent)


def inside_s(pricing: Pricing, way: Candidate, sent: dict[tuple[str, str], int]) -> float:
    """Seconds in which an island's first rank hands out in a step what the islands have agreed on."""
    fabric, ranks = pricing.machine.fabric, islands_of(pricing, way)[0]
    rate = min((fabric.rates[ranks[0]][rank] for rank in ranks[1:]), default=math.inf)
    return sum(num_bytes for (_, level), num_bytes in sent.items() if level == "intra") / rate


def roughly_islands(pricing: Pricing, way: Candidate) -> float:
    """Seconds of a step by closed forms, of the first island. Raises ConfigError for what can't run."""
    sent, fabric = spread(pricing, way, around(pricing, way)), pricing.machine.fabric
    islands = islands_of(pricing, way)
    slowest = min(fabric.rates[a[0]][b[0]] for a in islands for b in islands if a is not b)
    exchange_s = sent[OPERATION, "inter"] / slowest + inside_s(pricing, way, sent)
    return rough_s(pricing.on(islands[0]), way.inside) + exchange_s


def links_between(pricing: Pricing, way: Candidate) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield (from rank, to rank), and bytes in a step, of the exchange and of handing it out."""
    sent, islands = spread(pricing, way, around(pricing, way)), islands_of(pricing, way)
    crossing = sum(num_bytes for (_, level), num_bytes in sent.items() if level == "inter")
    inside = sum(num_bytes for (_, level), num_bytes in sent.items() if level == "intra")
    for ranks in islands:
        for other in islands:
            if other is not ranks:
                yield (ranks[0], other[0]), crossing / (len(islands) - 1)
        for rank in ranks[1:]:
            yield (ranks[0], rank), inside / (len(ranks) - 1)
