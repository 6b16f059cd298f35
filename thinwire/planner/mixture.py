"""Prices mixtures: a dense model of the same work, and ranks that share the experts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from thinwire.cost import Line, Links, Machine, Timeline, Work, simulate
from thinwire.cost.graph import ROUND
from thinwire.cost.simulator import COMMUNICATION, TRAINING
from thinwire.hosts.ranks import neighbours
from thinwire.layout.mesh import MeshShape
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import MethodPlan
from thinwire.models.moe import MoEConfig
from thinwire.options import EXPERTS
from thinwire.planner.candidates import Candidate
from thinwire.planner.experts import CHOSEN, apart_of, rows_sent, step_of
from thinwire.planner.options import AUTO, ExplainConfig
from thinwire.planner.pricing import Pricing
from thinwire.planner.search import Priced
from thinwire.planner.settings import name_of


def links_on(machine: Machine, flops: float) -> Links:
    """The links of a machine as lines: of its slowest pairs, while all ranks send. flops: of one rank's experts."""
    fabric = machine.fabric
    crossing = [pair for pair in fabric.pairs if fabric.ports(pair)]
    inside = [pair for pair in fabric.pairs if not fabric.ports(pair)]
    rate, local_rate = (min((fabric.rates[a][b] for a, b in pairs), default=math.inf) for pairs in (crossing, inside))
    delay_s = max((fabric.delays_s[a][b] for a, b in crossing or inside), default=0.0)
    stated = Links.stated(rate, local_rate, delay_s, machine.local_size)
    return replace(stated, product=Line(0.0, 1 / flops))


@dataclass(frozen=True)
class SharedExperts:
    """A step in which ranks share experts.

    Attributes:
        timeline: of everything but the experts' own weights and gradients.
        plan: what a rank holds and sends.
        travel: the fastest way of what travels.
        layer_s: seconds of one layer's rows and products, forward and backward.
        weights_s: of the experts' weights and gradients, which nothing hides.
        link_bytes: of rows, weights and gradients of experts, by (from rank, to rank).
    """

    timeline: Timeline
    plan: MethodPlan
    travel: ExpertParallel
    layer_s: float
    weights_s: float
    link_bytes: dict[tuple[int, int], float]


def shared_experts(pricing: Pricing, way: Candidate) -> SharedExperts:
    """Simulate a step in the fastest way of what travels, on the slowest links. Raises ConfigError for what can't run.

    Weights outside of the experts travel as in the strategy's own step.
    """
    strategy, model = pricing.methods[way.strategy], pricing.model
    config, num_layers = model.config, model.config.num_hidden_layers
    assert isinstance(config, MoEConfig)
    grid = pricing.placed(pricing.ranks_of(pricing.nodes))
    links = links_on(pricing.machine, grid.flops / grid.busy)
    asked, shape = asked_of(pricing, way), MeshShape(way.sizes).in_order()
    plan, _, ways = step_of(strategy, model, asked, shape, links)
    travel, layer_s = next(iter(ways.items()))
    rest, experts, replicas = apart_of(model, asked, shape)
    layer, ends = pricing.layer_and_ends(way)
    products = 6.0 * config.num_experts_per_tok * config.intermediate_size * config.hidden_size * pricing.seq_len
    operations = way.micro_batch * (num_layers * (layer.operations - products) + ends.operations) / way.sequence
    inside_s = num_layers * (layer_s + pricing.attention(way).seconds) / grid.busy
    work = Work(pricing.layer, operations + (grid.pass_s + inside_s) * grid.flops / 3)
    graph = strategy.schedule(rest, pricing.replicas(way), way.num_micro_batches, work)
    sent = strategy.plan(experts, replicas, asked.passes).sent
    carried = Counter[tuple[int, int]]()
    for first in range(0, pricing.machine.num_ranks):
        holders = neighbours(first, way.experts, way.sequence)
        for (source, target), num_bytes in rows_sent(model, asked, shape, travel).items():
            if holders[source] == first:
                carried[first, holders[target]] += num_layers * way.num_micro_batches * num_bytes
        same = [rank for rank in range(pricing.machine.num_ranks) if rank not in holders or rank == first]
        for other in same:
            if other != first:
                carried[first, other] += sum(sent.values()) / (len(same) - 1)  # type: ignore[assignment]
    return SharedExperts(
        simulate(graph, pricing.machine), plan, travel, layer_s, links.seconds(sent), dict(carried)
    )  # fmt: skip


def price_experts(pricing: Pricing, way: Candidate) -> Priced:
    """The costs of a step in which ranks share experts; see `shared_experts`."""
    found = shared_experts(pricing, way)
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
        pricing.ranks_of(pricing.nodes), terms, counted,
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
