"""Prices mixtures: a dense model of the same work, and ranks that share the experts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from thinwire.cost import Line, Links, Machine, Timeline, Work, simulate
from thinwire.cost.graph import ROUND
from thinwire.cost.network import Pair
from thinwire.cost.simulator import COMMUNICATION, TRAINING
from thinwire.hosts.ranks import neighbours
from thinwire.layout.mesh import MeshShape
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import MethodPlan
from thinwire.models.moe_config import MoEConfig
from thinwire.options import EXPERTS
from thinwire.planner.candidates import Candidate
from thinwire.planner.experts import CHOSEN, apart_of, rows_sent, step_of
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.order import RankOrder
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced
from thinwire.planner.settings import name_of


def links_on(machine: Machine, flops: float, pairs: Collection[Pair]) -> Links:
    """The links of a machine as lines: of the slowest of these pairs, while all ranks send.

    flops: of one rank's experts.
    """
    fabric = machine.fabric
    crossing = [pair for pair in pairs if fabric.ports(pair)]
    inside = [pair for pair in pairs if not fabric.ports(pair)]
    rate, local_rate = (min((fabric.rates[a][b] for a, b in some), default=math.inf) for some in (crossing, inside))
    delay_s = max((fabric.delays_s[a][b] for a, b in crossing or inside), default=0.0)
    stated = Links.stated(rate, local_rate, delay_s, machine.local_size)
    return replace(stated, product=Line(0.0, 1 / flops))


def pairs_of(way: Candidate) -> tuple[list[Pair], list[Pair]]:
    """The pairs of ranks that share experts, and those of replicas of the same experts, by their places in the mesh."""
    ranks, within, across = range(way.num_ranks), list[Pair](), list[Pair]()
    for rank in ranks:
        within += [(rank, other) for other in neighbours(rank, way.experts, way.sequence) if other != rank]
        part = rank // way.sequence % way.experts
        across += [(rank, other) for other in ranks if other != rank and other // way.sequence % way.experts == part]
    return within, across


@dataclass(frozen=True)
class SharedExperts:
    """A step in which ranks share experts.

    Attributes:
        timeline: of everything but the experts' own weights and gradients.
        plan: what a rank holds and sends.
        travel: the fastest way of what travels.
        layer_s: seconds of one layer's rows and products, forward and backward.
        weights_s: of the experts' weights and gradients, which nothing hides.
        link_bytes: of rows, weights and gradients of experts, by (from, to), as places in the mesh.
    """

    timeline: Timeline
    plan: MethodPlan
    travel: ExpertParallel
    layer_s: float
    weights_s: float
    link_bytes: dict[tuple[int, int], float]


def shared_experts(pricing: Pricing, way: Candidate, order: RankOrder = ()) -> SharedExperts:
    """Simulate a step in the fastest way of what travels, on the slowest links that it takes.

    Weights outside of the experts travel as in the strategy's own step. order: the rank in each place of the mesh;
    empty: unchanged. Raises ConfigError for what can't run.
    """
    strategy, model = pricing.methods[way.strategy], pricing.model
    config, num_layers = model.config, model.config.num_hidden_layers
    assert isinstance(config, MoEConfig)
    order = order or pricing.ranks_of(pricing.nodes)
    grid, machine, (within, across) = pricing.placed(order), pricing.machine.part(order), pairs_of(way)
    links, between = (links_on(machine, grid.flops / grid.busy, pairs) for pairs in (within, across))
    asked, shape = asked_of(pricing, way), MeshShape(way.sizes).in_order()
    plan, _, ways = step_of(strategy, model, asked, shape, links)
    travel, layer_s = next(iter(ways.items()))
    rest, experts, replicas = apart_of(model, asked, shape)
    layer, ends = pricing.layer_and_ends(way)
    products = 6.0 * config.num_experts_per_tok * config.intermediate_size * config.hidden_size * pricing.seq_len
    operations = way.micro_batch * (num_layers * (layer.operations - products) + ends.operations) / way.sequence
    inside_s = num_layers * (layer_s + pricing.attention(way, order).seconds) / grid.busy
    work = Work(pricing.layer, operations + (grid.pass_s + inside_s) * grid.flops / 3)
    graph = strategy.schedule(rest, pricing.replicas(way), way.num_micro_batches, work)
    sent = strategy.plan(experts, replicas, asked.passes).sent
    carried = Counter[Pair]()
    rows = rows_sent(model, asked, shape, travel)
    for first in range(way.num_ranks):
        holders = neighbours(first, way.experts, way.sequence)
        for (source, target), num_bytes in rows.items():
            if holders[source] == first:
                carried[first, holders[target]] += num_layers * way.num_micro_batches * num_bytes
    for pair in across:
        carried[pair] += sum(sent.values()) / (len(across) // way.num_ranks)  # type: ignore[assignment]
    return SharedExperts(
        simulate(graph, machine), plan, travel, layer_s, between.seconds(sent), dict(carried)
    )  # fmt: skip


def cost_of_experts(pricing: Pricing, way: Candidate) -> Callable[[RankOrder], float]:
    """The seconds of the experts' messages on the link where they take longest, as a function of the order of ranks.

    A layer's rows travel to the experts and back, forward and backward.
    """
    fabric, found = pricing.machine.fabric, shared_experts(pricing, way)
    trips = 4 * way.num_micro_batches * len(pricing.model.model.layers)

    def cost(order: RankOrder) -> float:
        pairs = (((order[a], order[b]), num_bytes) for (a, b), num_bytes in found.link_bytes.items())
        return max(num_bytes / fabric.rates[a][b] + trips * fabric.delays_s[a][b] for (a, b), num_bytes in pairs)

    return cost


def price_experts(pricing: Pricing, way: Candidate, order: RankOrder) -> Priced:
    """The costs of a step in which ranks share experts; see `shared_experts`."""
    found = shared_experts(pricing, way, order)
    num_layers, timeline = pricing.config.num_hidden_layers, found.timeline
    counted = pricing.counted(way, sum(found.plan.memory.values()) + pricing.kept_bytes(way))
    memory = pricing.estimator.peak_bytes(counted)
    step_s = timeline.makespan_s + found.weights_s
    # Rows on their way are a wait, which their products are a part of.
    rows_s = num_layers * way.num_micro_batches * found.layer_s
    compute_s = max(0.0, timeline.busy_s(0, TRAINING) - rows_s)
    terms = {
        "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s,
        "codec_s": timeline.busy_s(0, COMMUNICATION) - timeline.kinds_s(0).get(ROUND, 0.0),
        "sent_bytes": float(sum(found.plan.sent.values())), "peak_rss_bytes": memory,
    }  # fmt: skip
    travel = tuple((name, getattr(found.travel, name)) for name in CHOSEN if name != "parallel")
    return Priced(
        replace(way, travel=travel), step_s, 1 - compute_s / step_s, memory, min(rows_s + found.weights_s, step_s),
        order, terms, counted,
    )  # fmt: skip


def asked_of(pricing: Pricing, way: Candidate) -> ExplainConfig:
    """The question that the pricing of experts answers."""
    stated = pricing.tables.get(EXPERTS, {})
    table: dict[str, Any] = {**dict.fromkeys(CHOSEN, AUTO), **stated, "parallel": way.experts}
    return ExplainConfig(
        strategy=name_of(way.strategy), nodes=len(pricing.nodes), local_size=pricing.machine.local_size,
        seq_len=pricing.seq_len, micro_batches=way.num_micro_batches, micro_batch=way.micro_batch,
        dtype="bf16" if pricing.dtype == "bf16" else "fp32", tables={**pricing.tables, EXPERTS: table},
    )  # fmt: skip
