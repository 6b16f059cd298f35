"""Prices mixtures: a dense model of the same work, and ranks that share the experts."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from thinwire.cost import Line, Links, Machine, Timeline, Work, simulate
from thinwire.cost.graph import ROUND
from thinwire.cost.network import Pair
from thinwire.cost.simulator import COMMUNICATION, TRAINING
from thinwire.hosts.ranks import neighbours
from thinwire.layout.mesh import MeshShape
from thinwire.methods.experts import ExpertParallel
from thinwire.methods.interface import MethodPlan
from thinwire.models import MoELlama
from thinwire.models.moe_config import MoEConfig
from thinwire.models.seam import experts_of
from thinwire.options import EXPERTS
from thinwire.planner.candidates import Candidate
from thinwire.planner.experts import CHOSEN, alike_on, kept_numel, placed, rows_sent, split_off, step_of
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
    """The pairs of ranks that share experts, and those of replicas of the same experts, by their places in the mesh.

    Places are those of the first of each tensor axis, stage by stage.
    """
    ranks, within, across = range(way.stages * way.sharing), list[Pair](), list[Pair]()
    for rank in ranks:
        within += [(rank, other) for other in neighbours(rank, way.experts, way.sequence) if other != rank]
        place = rank // way.sharing, rank // way.sequence % way.experts
        others = (other for other in ranks if (other // way.sharing, other // way.sequence % way.experts) == place)
        across += [(rank, other) for other in others if other != rank]
    return within, across


@dataclass(frozen=True)
class SharedLayer:
    """What the experts of a layer cost where ranks share them.

    Attributes:
        whole: the model on a rank of the tensor axis, with all experts.
        asked, shape: the ranks of one stage, as the pricing of experts takes them.
        plan: what a rank holds and sends without stages.
        travel: the fastest way of what travels.
        seconds: of one layer's rows and products, forward and backward.
        between: the links of replicas of the same experts.
    """

    whole: nn.Module
    asked: ExplainConfig
    shape: MeshShape
    plan: MethodPlan
    travel: ExpertParallel
    seconds: float
    between: Links

    def rows(self) -> dict[Pair, int]:
        """Bytes of one layer's rows in a micro-batch, forward and backward, by (holder, holder)."""
        return rows_sent(self.whole, self.asked, self.shape, self.travel)


def shared_layer(pricing: Pricing, way: Candidate, order: RankOrder) -> SharedLayer:
    """The experts of a layer in the fastest way of what travels, on the slowest links that it takes.

    Raises ConfigError for what can't run.
    """
    strategy, grid = pricing.methods[way.strategy], pricing.placed(order, way.tensor)
    machine, flops = grid.part(order[:: way.tensor]), grid.flops / grid.busy
    links, between = (links_on(machine, flops, pairs) for pairs in pairs_of(way))
    whole = copy.copy(pricing.cut(way.tensor))
    assert isinstance(whole, MoELlama)
    whole.config = replace(whole.config, intermediate_size=whole.config.intermediate_size // way.tensor)
    asked = asked_of(pricing, way)
    shape = MeshShape({**way.sizes, "pipeline": 1, "tensor": 1}).in_order()
    plan, _, ways = step_of(strategy, whole, asked, shape, links)
    travel, seconds = next(iter(ways.items()))
    return SharedLayer(whole, asked, shape, plan, travel, seconds, between)


def products_of(pricing: Pricing, way: Candidate) -> float:
    """Operations of a micro-batch's forward in the experts of a layer, on one rank."""
    config = pricing.model.config
    assert isinstance(config, MoEConfig)
    each = 6.0 * config.num_experts_per_tok * config.intermediate_size * config.hidden_size
    return each * pricing.seq_len * way.micro_batch / way.sequence / way.tensor


@dataclass(frozen=True)
class SharedExperts:
    """A step without stages in which ranks share experts.

    Attributes:
        timeline: of everything but the experts' own weights and gradients.
        layer: what the experts of a layer cost.
        weights_s: of the experts' weights and gradients, which nothing hides.
        link_bytes: of rows, weights and gradients of experts, by (from, to), as places in the mesh.
    """

    timeline: Timeline
    layer: SharedLayer
    weights_s: float
    link_bytes: dict[Pair, float]


def shared_experts(pricing: Pricing, way: Candidate, order: RankOrder = ()) -> SharedExperts:
    """Simulate a step without stages; see `shared_layer`.

    Weights outside of the experts travel as in the strategy's own step. order: the rank in each place of the mesh;
    empty: unchanged. Raises ConfigError for what can't run.
    """
    strategy, num_layers = pricing.methods[way.strategy], pricing.config.num_hidden_layers
    order = order or pricing.ranks_of(pricing.nodes)
    found, grid, replicas = shared_layer(pricing, way, order), pricing.placed(order, way.tensor), pricing.replicas(way)
    inside_s = num_layers * found.seconds / grid.busy
    operations = pricing.forward_of(way, order) - num_layers * products_of(pricing, way) + inside_s * grid.flops / 3
    _, placement = placed(found.whole, found.asked, found.shape)
    rest, experts = split_off(found.whole, placement)
    graph = strategy.schedule(rest, replicas, way.num_micro_batches, Work(pricing.layer, operations))
    sent = strategy.plan(experts, alike_on(found.asked, found.shape), found.asked.passes).sent
    carried, across = Counter[Pair](), pairs_of(way)[1]
    for first in range(way.sharing):
        holders = neighbours(first, way.experts, way.sequence)
        for (source, target), num_bytes in found.rows().items():
            if holders[source] == first:
                carried[first, holders[target]] += num_layers * way.num_micro_batches * num_bytes
    for pair in across:
        carried[pair] += sum(sent.values()) / (len(across) // way.sharing)  # type: ignore[assignment]
    return SharedExperts(
        simulate(graph, grid.part(grid.groups(1)[0])), found, found.between.seconds(sent), dict(carried)
    )  # fmt: skip


def cost_of_experts(pricing: Pricing, way: Candidate) -> Callable[[RankOrder], float]:
    """The seconds of the experts' messages on the link where they take longest, as a function of the order of ranks.

    A layer's rows travel to the experts and back, forward and backward.
    """
    fabric, found = pricing.machine.fabric, shared_experts(pricing, way)
    trips = 4 * way.num_micro_batches * len(pricing.model.model.layers)

    def cost(order: RankOrder) -> float:
        first = order[:: way.tensor]
        pairs = (((first[a], first[b]), num_bytes) for (a, b), num_bytes in found.link_bytes.items())
        return max(num_bytes / fabric.rates[a][b] + trips * fabric.delays_s[a][b] for (a, b), num_bytes in pairs)

    return cost


def price_experts(pricing: Pricing, way: Candidate, order: RankOrder) -> Priced:
    """The costs of a step in which ranks share experts; see `shared_layer`."""
    return experts_alone(pricing, way, order) if way.stages == 1 else experts_in_stages(pricing, way, order)


def experts_alone(pricing: Pricing, way: Candidate, order: RankOrder) -> Priced:
    """The costs of a step without stages."""
    found = shared_experts(pricing, way, order)
    plan, num_layers, timeline = found.layer.plan, pricing.config.num_hidden_layers, found.timeline
    counted = pricing.counted(way, sum(plan.memory.values()) + pricing.kept_bytes(way))
    memory = pricing.estimator.peak_bytes(counted)
    step_s = timeline.makespan_s + found.weights_s
    # Rows on their way are a wait, which their products are a part of.
    rows_s = num_layers * way.num_micro_batches * found.layer.seconds
    compute_s = max(0.0, timeline.busy_s(0, TRAINING) - rows_s)
    terms = {
        "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s,
        "codec_s": timeline.busy_s(0, COMMUNICATION) - timeline.kinds_s(0).get(ROUND, 0.0),
        "sent_bytes": float(sum(plan.sent.values())), "peak_rss_bytes": memory,
    }  # fmt: skip
    way, on_link_s = replace(way, travel=travel_of(found.layer)), min(rows_s + found.weights_s, step_s)
    return Priced(way, step_s, 1 - compute_s / step_s, memory, on_link_s, order, terms, counted)


def experts_in_stages(pricing: Pricing, way: Candidate, order: RankOrder) -> Priced:
    """The costs of a step with stages, whose replicas share the experts of their layers.

    A layer takes as long as its rows and products do, in place of the products of a dense model of the same work.
    Weights of experts come on top of the step, as they do without stages.
    """
    strategy, grid = pricing.methods[way.strategy], pricing.placed(order, way.tensor)
    found = shared_layer(pricing, way, order)
    sizes, placement = placed(found.whole, found.asked, found.shape)
    alike, passes = alike_on(found.asked, found.shape), way.num_micro_batches
    more_s = found.seconds / grid.busy - 3 * products_of(pricing, way) / grid.flops
    staged = pricing.staged(way, order, more_s, lambda part: split_off(part, placement)[0])
    stages, parts = staged.stages, [split_off(part, placement) for part in staged.stages.parts]
    own = [strategy.plan(experts, alike, passes) for _, experts in parts]
    layers = [len(experts_of(part)) for part in stages.parts]
    # Whole weights that stay for a step, and the sums of their gradients.
    kept = 2 * 4 * kept_numel(found.travel, placement, sizes.expert_numel)
    held = max(
        stages.memory_bytes(stage, pricing.plan_of(way, rest)) + sum(own[stage].memory.values()) + layers[stage] * kept
        for stage, (rest, _) in enumerate(parts)
    )
    counted = pricing.counted(way, held)
    memory = pricing.estimator.peak_bytes(counted)
    weights_s = max(found.between.seconds(plan.sent) for plan in own)
    step_s, rows_s = stages.step_s + weights_s, layers[0] * passes * found.seconds
    compute_s = max(0.0, stages.step_s - stages.idle_s(0) - rows_s)
    rows = sum(num_bytes for (source, _), num_bytes in found.rows().items() if source == 0)
    sent = sum(num_bytes for (source, _), num_bytes in staged.link_bytes().items() if source == 0)
    terms = {
        "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s, "pipeline_s": stages.first_s,
        "sent_bytes": sent + layers[0] * passes * rows + sum(own[0].sent.values()), "peak_rss_bytes": memory,
    }  # fmt: skip
    return Priced(
        replace(way, travel=travel_of(found)), step_s, stages.bubble, memory, min(rows_s + weights_s, step_s), order,
        terms, counted,
    )  # fmt: skip


def travel_of(found: SharedLayer) -> tuple[tuple[str, Any], ...]:
    """The options of what travels, as chosen."""
    return tuple((name, getattr(found.travel, name)) for name in CHOSEN if name != "parallel")


def asked_of(pricing: Pricing, way: Candidate) -> ExplainConfig:
    """The question that the pricing of experts answers, of the ranks of one stage."""
    stated, grid = pricing.tables.get(EXPERTS, {}), pricing.replicas(way)
    table: dict[str, Any] = {**dict.fromkeys(CHOSEN, AUTO), **stated, "parallel": way.experts}
    return ExplainConfig(
        strategy=name_of(way.strategy), nodes=grid.num_nodes, local_size=grid.local_size,
        seq_len=pricing.seq_len, micro_batches=way.num_micro_batches, micro_batch=way.micro_batch,
        dtype="bf16" if pricing.dtype == "bf16" else "fp32", tables={**pricing.tables, EXPERTS: table},
    )  # fmt: skip
