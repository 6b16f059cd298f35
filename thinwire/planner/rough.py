"""Closed forms of a candidate's step, and the order of ranks in which they take the fewest seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from thinwire.cost import Network
from thinwire.cost.closed import pipette_s, ring_s, trip_s
from thinwire.planner.candidates import Candidate
from thinwire.planner.grouping import cost_of_groups, crossing_bytes
from thinwire.planner.mixture import cost_of_experts
from thinwire.planner.order import RankOrder, annealed
from thinwire.planner.placed import groups_of
from thinwire.planner.pricing import Pricing

# Rates and delays, and seconds of messages, that differ by less make no order of ranks better than another: so much is
# noise.
EVEN, EVEN_S = 1.05, 1e-3


def rough_s(pricing: Pricing, way: Candidate) -> float:
    """Seconds of a step in its best order, without islands; used to select candidates to simulate.

    Raises ConfigError for a strategy that can't train so.
    """
    pricing.check(way)
    machine, operations = pricing.machine, 3 * pricing.forward_of(way)
    busy = pricing.placed(pricing.ranks_of(pricing.nodes)).busy
    compute_s = operations / machine.rates[pricing.layer] * busy / min(machine.speeds or (1.0,))
    # A forward is a third of a micro-batch's work.
    compute_s *= 1.0 if way.pipeline.recompute == "never" else 4 / 3
    if way.stages == 1:
        return way.num_micro_batches * compute_s + link_s(pricing, way)
    return cost_of(pricing, way, compute_s)(best_nodes(pricing, way))


def rough_bytes(pricing: Pricing, way: Candidate) -> float:
    """Memory of a process by closed forms, without islands: of an even cut, on the first stage or on the last.

    The first keeps the micro-batches in flight, the last one with its head. Without stages nothing is left out.
    """
    layer, ends = pricing.layer_and_ends(way)
    times, held = way.micro_batch / way.sequence, sum(pricing.plan_of(way, pricing.cut(way.tensor)).memory.values())
    layers_bytes = len(pricing.model.model.layers) * layer.kept(times)
    in_flight = min(way.stages, way.num_micro_batches) if way.pipeline.recompute == "never" else 1
    kept = max(in_flight * layers_bytes / way.stages, layers_bytes / way.stages + ends.kept(times))
    return pricing.estimator.peak_bytes(pricing.counted(way, held / way.stages + kept))


def best_order(pricing: Pricing, way: Candidate) -> RankOrder:
    """The order of ranks with the fewest seconds by closed forms."""
    return pricing.ranks_of(best_nodes(pricing, way))


def best_nodes(pricing: Pricing, way: Candidate) -> RankOrder:
    """The order of nodes with the fewest seconds, found once for all sizes of micro-batches.

    Those send as much in a step: m/p trips, each with 1/m of it, if there are as many micro-batches as stages. With
    fewer there is one trip. Each trip has the links' delays, so where these differ the number of trips counts too.
    Computing is left out: it is the same in every order. Where all ranks send to all others, every order is as good.
    """
    counts = way.num_micro_batches < way.stages or not has_even_delays(pricing.machine.fabric)
    axes = (way.stages, way.tensor, way.sequence, way.experts)
    key = (*axes, way.group, way.strategy, way.borders, way.micro_batch if counts else 0)
    if key not in pricing.orders:
        cost = cost_of(pricing, way, 0.0) if way.stages > 1 else cost_of_order(pricing, way)
        is_free = len(pricing.nodes) < 3 or is_even(pricing.machine.fabric)
        order = pricing.nodes
        if cost is not None and not is_free:
            found, least = annealed(cost, order)
            order = found if EVEN * least < cost(order) else order
        pricing.orders[key] = order
    return pricing.orders[key]


def is_even(fabric: Network) -> bool:
    """Whether the links between nodes are all alike."""
    pairs = [pair for pair in fabric.pairs if fabric.ports(pair)]
    rates = [fabric.rates[a][b] for a, b in pairs]
    return not pairs or (max(rates) <= EVEN * min(rates) and has_even_delays(fabric))


def has_even_delays(fabric: Network) -> bool:
    """Whether the delays between nodes are all alike."""
    delays = [fabric.delays_s[a][b] for a, b in fabric.pairs if fabric.ports((a, b))]
    return not delays or max(delays) - min(delays) <= EVEN_S


def cost_of(pricing: Pricing, way: Candidate, compute_s: float) -> Callable[[RankOrder], float]:
    """The seconds of a step, of which a micro-batch computes for compute_s, as a function of the order of nodes."""
    fabric, local = pricing.machine.fabric, pricing.machine.local_size
    features = way.micro_batch * pricing.seq_len * pricing.config.hidden_size // way.sequence
    crossing = way.pipeline.crossing(0)
    sizes = [crossing.packet_bytes(to, features, torch.float32) / way.tensor for to in ("forward", "backward")]
    whole = crossing_bytes(pricing, way)[0] if way.replicas > 1 else 0.0
    sent = way.tensor * whole / way.stages / 2

    computes = [compute_s * share for share in pricing.shares(way)]
    ranks = range(len(fabric.nodes))
    # There and back, of neighbours: it is asked for as often as an order is tried.
    hops = [[trip_s([a, b], fabric, *sizes) if a != b else 0.0 for b in ranks] for a in ranks]

    def cost(nodes: RankOrder) -> float:
        groups = groups_of([node * local + each for node in nodes for each in range(local)], way.stages, way.tensor)
        trip = max(sum(hops[a][b] for a, b in itertools.pairwise(own)) for own in zip(*groups, strict=True))
        ring = max(ring_s(own, fabric, sent) for own in groups) if sent else 0.0
        return pipette_s(computes, way.num_micro_batches, trip, ring)

    return cost


def cost_of_order(pricing: Pricing, way: Candidate) -> Callable[[RankOrder], float] | None:
    """The seconds of messages in groups, between holders of experts, and in rings, as a function of the order of nodes.

    None where there are none of these: then all ranks send to all others.
    """
    if way.group:
        return cost_of_groups(pricing, way)
    rings = cost_of_rings(pricing, way)
    # A single group is of all ranks.
    if way.experts == 1 or way.experts * way.sequence == way.num_ranks or len(pricing.nodes) < 3:
        return rings
    shared = cost_of_experts(pricing, way)
    return lambda nodes: shared(pricing.ranks_of(nodes)) + (rings(nodes) if rings is not None else 0.0)


def cost_of_rings(pricing: Pricing, way: Candidate) -> Callable[[RankOrder], float] | None:
    """The seconds of the messages of shared sequences and of a strategy's ring, as a function of the order of nodes.

    None where neither is: then all ranks send to all others. Each group of ranks sends around a ring of its own.
    """
    fabric, local = pricing.machine.fabric, pricing.machine.local_size
    passes, together = way.num_micro_batches * len(pricing.model.model.layers), way.sequence * way.tensor
    attention = passes * pricing.attention(way).sent_by(0) / 2 if together > local and way.sequence > 1 else 0.0
    ring = pricing.plan_of(way, pricing.cut(way.tensor)).sent_on("inter") / 2 if pricing.is_ring(way) else 0.0
    if not attention and not ring:
        return None

    def cost(nodes: RankOrder) -> float:
        ranks = pricing.ranks_of(nodes)
        groups = [ranks[first : first + together : way.tensor] for first in range(0, len(ranks), together)]
        shared_s = max(ring_s(group, fabric, attention) for group in groups) if attention else 0.0
        return shared_s + (ring_s(groups_of(ranks, 1, way.tensor)[0], fabric, ring) if ring else 0.0)

    return cost


def link_s(pricing: Pricing, way: Candidate) -> float:
    """Seconds of the slowest pair's messages, if all ranks send the same; in the best order where groups have one."""
    plan, machine = pricing.plan_of(way, pricing.cut(way.tensor)), pricing.machine
    fabric = machine.fabric
    (crossing, to_one), of_groups = crossing_bytes(pricing, way), cost_of_groups(pricing, way)
    pairs = [pair for pair in fabric.pairs if fabric.ports(pair)]
    slowest = min((fabric.rates[a][b] for a, b in pairs), default=math.inf)
    ports = min(fabric.port_rates().values(), default=math.inf)
    of_node = machine.local_size * crossing if plan.crossing is None or way.group else plan.crossing
    pairs_s = to_one / slowest if of_groups is None else of_groups(best_nodes(pricing, way))
    return max(pairs_s, of_node / ports)
