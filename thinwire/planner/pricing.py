"""Prices candidates on measured machines: memory, and the parts of a simulated step."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from thinwire.collectives import Topology
from thinwire.cost import Machine, Timeline, Work, simulate
from thinwire.cost.graph import ROUND
from thinwire.cost.machine import LAYER, MIXTURE
from thinwire.cost.simulate import COMMUNICATION, TRAINING
from thinwire.errors import ConfigError
from thinwire.methods.experts import check_data_method
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.memory import Floor, Residency, placed as parts_of, resident_method, settled
from thinwire.methods.pipeline.inside import check_inside
from thinwire.methods.sequence.inside import check_strategy
from thinwire.models import Llama, MoELlama
from thinwire.models.llama import LlamaConfig
from thinwire.models.tensor import cut_skeleton
from thinwire.options import Tables
from thinwire.planner.attention import AttentionCost, attention_of
from thinwire.planner.candidates import Candidate
from thinwire.planner.forward import layer_and_ends
from thinwire.planner.islands import price_islands, roughly_islands
from thinwire.planner.memory import Estimator, Offset, Recorded, features_of
from thinwire.planner.mixture import dense_of, price_experts
from thinwire.planner.order import RankOrder
from thinwire.planner.placed import PlacedMachine
from thinwire.planner.rough import best_order, link_s, rough_s
from thinwire.planner.search import Priced
from thinwire.planner.stages import Stages, stages_of
from thinwire.registry import check_on_mesh


@dataclass(frozen=True)
class Staged:
    """A simulated step of a candidate with stages: of the slowest pipeline, then of the replicas of each stage."""

    grid: PlacedMachine
    stages: Stages
    exchanges: tuple[Timeline, ...]


@dataclass
class Pricing:
    """Prices candidates for one model on one machine.

    methods: by name of the strategy, and of the method of islands. dtype: the compute type. estimator: of the memory of
    a process. tables: options that are stated. spreads, orders: what islands exchange, and the best orders of nodes,
    once they are known.
    """

    model: Llama
    machine: Machine
    methods: Mapping[str, Method]
    seq_len: int
    dtype: str
    estimator: Estimator = field(default_factory=Offset)
    tables: Tables = field(default_factory=dict)
    spreads: dict[Hashable, dict[tuple[str, str], int]] = field(default_factory=dict)
    orders: dict[Hashable, RankOrder] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], Pricing] = field(default_factory=dict)
    _cut: dict[int, Llama] = field(default_factory=dict)
    _attentions: dict[Hashable, AttentionCost] = field(default_factory=dict)
    _plans: dict[Hashable, MethodPlan] = field(default_factory=dict)

    @cached_property
    def layer(self) -> str:
        """The kind of work of the model's layers."""
        kind = MIXTURE if isinstance(self.model, MoELlama) else LAYER
        return self.machine.layer(self.model.config.hidden_size, self.dtype, kind)

    @cached_property
    def config(self) -> LlamaConfig:
        """Sizes of a dense model of the same work: a token of a mixture passes through some of its experts."""
        return dense_of(self.model.config)

    def on(self, ranks: Sequence[int]) -> Pricing:
        """The same on some of the ranks."""
        key = tuple(ranks)
        if key not in self._parts:
            self._parts[key] = replace(
                self, machine=self.machine.part(ranks), spreads={}, orders={}, _parts={}, _attentions={}, _plans={},
            )  # fmt: skip
        return self._parts[key]

    @cached_property
    def nodes(self) -> RankOrder:
        return tuple(range(self.machine.num_ranks // self.machine.local_size))

    def ranks_of(self, nodes: RankOrder) -> RankOrder:
        """The order of ranks from an order of nodes; a node's ranks stay together."""
        local = self.machine.local_size
        return tuple(node * local + each for node in nodes for each in range(local))

    def counted(self, way: Candidate, counted_bytes: float) -> Recorded:
        """What is known of a process with this many bytes of weights, states and activations."""
        return Recorded(features_of(self.config, way), counted_bytes, self.machine.base_bytes)

    def placed(self, order: RankOrder, tensor: int = 1) -> PlacedMachine:
        """The machine with its ranks in this order."""
        return PlacedMachine.of(self.machine, order, self.layer, len(self.model.model.layers), tensor)

    def cut(self, tensor: int) -> Llama:
        """The shapes of one rank of a tensor axis."""
        if tensor not in self._cut:
            self._cut[tensor] = copy.deepcopy(self.model) if tensor > 1 else self.model
            cut_skeleton(self._cut[tensor], tensor)
        return self._cut[tensor]

    def forward_of(self, way: Candidate) -> float:
        """Operations of a rank's forward of a micro-batch; what does not depend on these is converted into operations.

        That is a third of the fixed cost of a pass, and of the messages inside its layers, which nothing hides.
        """
        layer, ends = layer_and_ends(self.config, self.seq_len, tensor=way.tensor)
        grid = self.placed(self.ranks_of(self.nodes), way.tensor)
        num_layers = len(self.model.model.layers)
        operations = way.micro_batch * (num_layers * layer.operations + ends.operations) / way.sequence
        features = way.micro_batch * self.seq_len * self.config.hidden_size / way.sequence
        sum_s = grid.sum_s(4.0 * features, way.tensor)
        inside_s = num_layers * (4 * sum_s + self.attention(way).seconds / grid.busy)
        return operations + (grid.pass_s + inside_s) * grid.flops / 3

    def roughly(self, way: Candidate) -> float:
        """Seconds of a step by closed forms, in the best order by closed forms.

        Used to select candidates to simulate. Raises ConfigError for a strategy that can't train so.
        """
        if way.outer:
            return roughly_islands(self, way)
        self._check(way)
        return rough_s(self, way)

    def price(self, way: Candidate) -> Priced:
        """Simulate a candidate. Raises ConfigError for one that can't run."""
        if way.outer:
            return price_islands(self, way)
        self._check(way)
        if way.experts > 1:
            return price_experts(self, way)
        if way.memory:
            return self._resident(way)
        if way.stages == 1:
            return self._alone(way)
        order = best_order(self, way)
        staged = self.staged(way, order)
        grid, stages, exchanges = staged.grid, staged.stages, staged.exchanges
        exchange_s = max(timeline.makespan_s for timeline in exchanges)
        first, last = grid.slowest(way.stages)[0], grid.slowest(way.stages)[-1]
        tied_s = stages.tied_bytes / min(grid.machine.fabric.rates[first][last], grid.machine.fabric.rates[last][first])
        plans = [self.plan_of(way, stages.parts[stage]) for stage in range(way.stages)]
        counted = self.counted(way, max(stages.memory_bytes(stage, plan) for stage, plan in enumerate(plans)))
        memory = self.estimator.peak_bytes(counted)
        step_s = stages.step_s + exchange_s + tied_s
        exposed_s = stages.timeline.idle_s[0] + exchange_s + tied_s
        sent = stages.sent_bytes(0) + sum(exchanges[0].graph.sent(0).values())
        terms = {
            "step_s": step_s, "compute_s": step_s - exposed_s, "exposed_comm_s": exposed_s,
            "pipeline_s": stages.step_s, "sent_bytes": sent, "peak_rss_bytes": memory,
        }  # fmt: skip
        rates = grid.links(way.stages).rates
        on_link_s = max(num / rates[a][b] for (a, b), num in stages.link_bytes.items()) + exchange_s
        return Priced(way, step_s, stages.bubble, memory, min(on_link_s, step_s), order, terms, counted)

    def _check(self, way: Candidate) -> None:
        """Raise ConfigError for a strategy that can't train on a candidate's mesh."""
        method = self.methods[way.strategy]
        if way.tensor > 1:
            check_on_mesh(method)
        if way.sequence > 1:
            check_strategy(method)
        if way.experts > 1:
            check_data_method(method)
        if way.stages > 1:
            check_inside(method, way.replicas)

    def staged(self, way: Candidate, order: RankOrder) -> Staged:
        """The simulated step of a candidate with stages, its ranks in this order. Raises ConfigError."""
        grid = self.placed(order, way.tensor)
        sizes = (way.stages, way.num_micro_batches, way.micro_batch)
        attention_s = self.attention(way).seconds / grid.busy
        stages = stages_of(
            self.cut(way.tensor), way.pipeline, *sizes, self.seq_len, grid, tensor=way.tensor,
            sequence=way.sequence, attention_s=attention_s,
        )  # fmt: skip
        return Staged(grid, stages, tuple(self._exchange(way, stages, stage, grid) for stage in range(way.stages)))

    def simulated(self, way: Candidate) -> Timeline:
        """The simulated step of a candidate without stages."""
        grid, work = self.placed(self.ranks_of(self.nodes), way.tensor), Work(self.layer, self.forward_of(way))
        method, model = self.methods[way.strategy], self.cut(way.tensor)
        graph = method.schedule(model, self.replicas(way), way.num_micro_batches, work)
        return simulate(graph, grid.part(grid.groups(1)[0]))

    def _alone(self, way: Candidate) -> Priced:
        timeline = self.simulated(way)
        layer, ends = layer_and_ends(self.config, self.seq_len, tensor=way.tensor)
        kept = way.micro_batch * (len(self.model.model.layers) * layer.kept_bytes + ends.kept_bytes) / way.sequence
        plan = self.plan_of(way, self.cut(way.tensor))
        attention = way.num_micro_batches * len(self.model.model.layers) * self.attention(way).sent_by(0)
        counted = self.counted(way, sum(plan.memory.values()) + kept)
        memory = self.estimator.peak_bytes(counted)
        step_s, compute_s, kinds = timeline.makespan_s, timeline.busy_s(0, TRAINING), timeline.kinds_s(0)
        terms = {
            "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s,
            "codec_s": timeline.busy_s(0, COMMUNICATION) - kinds.get(ROUND, 0.0),
            "sent_bytes": sum(timeline.graph.sent(0).values()) + attention, "peak_rss_bytes": memory,
        }  # fmt: skip
        order = self.ranks_of(self.nodes)
        on_link_s = min(link_s(self, way), step_s)
        return Priced(way, step_s, 1 - compute_s / step_s, memory, on_link_s, order, terms, counted)

    def _resident(self, way: Candidate) -> Priced:
        """The costs of a candidate of which a part lies on a disk: what a step moves is not hidden by computing."""
        written, read = self.machine.disk
        if math.inf in (written, read):
            raise ConfigError("the disk was not measured; nearest: thinwire calibrate --disk FOLDER")
        whole = self._alone(replace(way, memory=""))
        place = resident_method(self.methods[way.strategy]), self.model, self.replicas(way), way.num_micro_batches
        layer, ends = layer_and_ends(self.config, self.seq_len)
        num_layers = len(self.model.model.layers)
        borders = 4 * num_layers * self.seq_len * self.model.config.hidden_size
        kept = {
            "keep": int(way.micro_batch * (num_layers * layer.kept_bytes + ends.kept_bytes)),
            "recompute": int(way.micro_batch * (layer.kept_bytes + ends.kept_bytes + borders)),
        }
        residency = settled(Residency(memory=way.memory), *place, kept)
        budget = residency.memory_bytes or 0
        Floor.of(residency, *place, kept).check(budget)
        parts = list(parts_of(residency, *place, kept))
        hosts = self.machine.cores.hosts
        # All ranks of a machine use its disk at once.
        moved_s = sum(part.read / read + part.written / written for part in parts) * max(map(hosts.count, hosts))
        # A layer is computed again before its backward, with a third of the operations of a whole pass.
        again_s = whole.terms["compute_s"] / 3 if residency.activations == "recompute" else 0.0
        step_s = whole.step_s + again_s + moved_s
        terms = {**whole.terms, "step_s": step_s, "compute_s": whole.terms["compute_s"] + again_s}
        return replace(whole, candidate=way, step_s=step_s, memory_bytes=min(budget, whole.memory_bytes), terms=terms)

    def replicas(self, way: Candidate) -> Topology:
        """The ranks of one stage that the strategy joins."""
        num = way.sharing
        local = min(self.machine.local_size // way.tensor, num)
        return Topology(num // local, local) if num % local == 0 else Topology(num, 1)

    def plan_of(self, way: Candidate, part: nn.Module) -> MethodPlan:
        """The strategy's plan of a part of the model, on the ranks that it joins."""
        shapes = tuple(param.shape for param in part.parameters())
        key = (way.strategy, way.sharing, way.tensor, way.num_micro_batches, shapes)
        if key not in self._plans:
            self._plans[key] = self.methods[way.strategy].plan(part, self.replicas(way), way.num_micro_batches)
        return self._plans[key]

    def _exchange(self, way: Candidate, stages: Stages, stage: int, grid: PlacedMachine) -> Timeline:
        """The messages between the replicas of a stage after its last backward."""
        nothing = Work(self.layer, 0.0)
        graph = self.methods[way.strategy].schedule(stages.parts[stage], self.replicas(way), 1, nothing)
        return simulate(graph, grid.part(grid.groups(way.stages)[stage]))

    def attention(self, way: Candidate) -> AttentionCost:
        """The messages of one layer's attention, if ranks share sequences: of neighbours, in the fastest layout."""
        key = (way.sequence, way.tensor, way.micro_batch)
        if way.sequence > 1 and key not in self._attentions:
            self._attentions[key] = attention_of(self.config, self.machine, way, self.seq_len)
        return self._attentions.get(key, AttentionCost())
