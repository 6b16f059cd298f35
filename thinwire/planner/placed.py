"""Prices candidates on measured machines: the rank in each place, and the time of a step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from thinwire.collectives import Topology
from thinwire.cost import Cores, Machine, Network, Timeline, Work, simulate
from thinwire.cost.closed import pipette_s, ring_s, trip_s
from thinwire.cost.graph import ROUND
from thinwire.cost.simulate import COMMUNICATION, TRAINING
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.options import FP32
from thinwire.methods.pipeline import Costs
from thinwire.methods.pipeline.across import STAGES as ACROSS_STAGES
from thinwire.methods.pipeline.inside import check_inside
from thinwire.methods.pipeline.options import Pipeline
from thinwire.models import Llama
from thinwire.planner.candidates import Candidate
from thinwire.planner.forward import layer_and_ends
from thinwire.planner.order import RankOrder, annealed
from thinwire.planner.search import Priced
from thinwire.planner.stages import Grid, Stages, stages_of

# What a process takes for each byte that formulas count: packets, temporary tensors, what the allocator keeps. Peaks of
# the demo model on a CPU were 1.43 and 1.50 times the formulas', in a pipeline and without.
SCRATCH = 1.5


@dataclass(frozen=True)
class PlacedMachine(Grid):
    """A measured machine with a rank in each place; replicas of a stage are neighbours. See Grid.

    pass_s: seconds of a pass through all layers, forward and backward, that don't depend on the number of operations.
    """

    machine: Machine = field(kw_only=True)
    order: RankOrder = field(kw_only=True)
    pass_s: float = field(kw_only=True)

    @classmethod
    def of(cls, machine: Machine, order: RankOrder, layer: str, num_layers: int) -> PlacedMachine:
        """The machine with ranks in this order. layer: the kind of work of the model's layers."""
        local, launch = machine.local_size, machine.rates.get(layer.replace("layer", "launch"), math.inf)
        flops, nodes = machine.rates[layer], machine.num_ranks // local
        return cls(nodes, local, flops, machine=machine, order=order, pass_s=num_layers / launch)

    def pipelines(self, stages: int) -> list[list[int]]:
        """The ranks of each pipeline, in order of its stages."""
        replicas = self.num_ranks // stages
        return [[self.order[stage * replicas + each] for stage in range(stages)] for each in range(replicas)]

    def groups(self, stages: int) -> list[list[int]]:
        """The ranks of each stage."""
        replicas = self.num_ranks // stages
        return [list(self.order[stage * replicas :][:replicas]) for stage in range(stages)]

    def slowest(self, stages: int) -> list[int]:
        """The ranks of the pipeline whose messages take longest."""
        fabric = self.machine.fabric
        return max(self.pipelines(stages), key=lambda ranks: trip_s(ranks, fabric, 1e6, 1e6))

    def links(self, stages: int, across: str = ACROSS_STAGES, tensor: int = 1) -> Network:
        ranks = self.slowest(stages)
        part = self.machine.part(ranks).fabric
        all_nodes = self.machine.network.nodes
        # Pipelines that have ranks on one node share its link.
        shares = max(all_nodes.count(node) / part.nodes.count(node) for node in part.nodes)
        if shares == 1:
            return part
        rates = tuple(
            tuple(rate if part.nodes[a] == part.nodes[b] else rate / shares for b, rate in enumerate(row))
            for a, row in enumerate(part.rates)
        )
        return replace(part, rates=rates)

    def cores(self, stages: int) -> Cores:
        own = self.machine.part(self.slowest(stages)).cores
        # A stage's work is one piece, on all of its rank's threads.
        return replace(own, num=tuple(num / self.machine.threads for num in own.num))

    def costs(self, found: Costs, options: Pipeline, stages: int) -> Costs:
        ranks, home = self.slowest(stages), options.home(stages)
        packing = {}
        for way, sizes in (("forward", found.forward_bytes), ("backward", found.backward_bytes)):
            codec = getattr(options, way)
            works = [] if codec == FP32 else [f"encode {codec}", f"decode {codec}"]
            packing[way] = sum(self.machine.seconds(ranks[0], Work(kind, sizes[0])) for kind in works)
        speeds = self.machine.speeds or (1.0,) * self.num_ranks

        def on(seconds: Sequence[float], more_s: float = 0.0) -> tuple[float, ...]:
            each, launch_s = zip(seconds, home, strict=True), self.pass_s / len(home) / 3
            return tuple((own + launch_s) / speeds[ranks[rank]] + more_s for own, rank in each)

        # All wait for the slowest.
        slowest = min(speeds[rank] for rank in ranks)
        spread = {kind: seconds / slowest for kind, seconds in found.spread.seconds.items()}
        return replace(
            found, spread=replace(found.spread, seconds=spread), weight_s=on(found.weight_s),
            forward_s=on(found.forward_s, packing["forward"]), input_s=on(found.input_s, packing["backward"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Staged:
    """A simulated step of a candidate with stages: of the slowest pipeline, then of the replicas of each stage."""

    grid: PlacedMachine
    stages: Stages
    exchanges: tuple[Timeline, ...]


@dataclass
class Pricing:
    """Prices candidates for one model on one machine. methods: by name of the strategy. dtype: the compute type."""

    model: Llama
    machine: Machine
    methods: Mapping[str, Method]
    seq_len: int
    dtype: str
    _orders: dict[Hashable, tuple[RankOrder, float]] = field(default_factory=dict)
    _plans: dict[Hashable, MethodPlan] = field(default_factory=dict)

    @cached_property
    def layer(self) -> str:
        """The kind of work of the model's layers."""
        return self.machine.layer(self.model.config.hidden_size, self.dtype)

    @cached_property
    def nodes(self) -> RankOrder:
        return tuple(range(self.machine.num_ranks // self.machine.local_size))

    def ranks_of(self, nodes: RankOrder) -> RankOrder:
        """The order of ranks from an order of nodes; a node's ranks stay together."""
        local = self.machine.local_size
        return tuple(node * local + each for node in nodes for each in range(local))

    def held_bytes(self, counted_bytes: float) -> float:
        """Memory of a process with this many bytes of weights, states and activations."""
        return self.machine.base_bytes + SCRATCH * counted_bytes

    def placed(self, order: RankOrder) -> PlacedMachine:
        """The machine with its ranks in this order."""
        return PlacedMachine.of(self.machine, order, self.layer, len(self.model.model.layers))

    def forward_of(self, num_sequences: int) -> float:
        """Operations of a forward through the model, with its fixed cost converted into operations."""
        layer, ends = layer_and_ends(self.model.config, self.seq_len)
        grid = self.placed(self.ranks_of(self.nodes))
        operations = len(self.model.model.layers) * layer.operations + ends.operations
        return num_sequences * operations + grid.pass_s * grid.flops / 3

    def roughly(self, way: Candidate) -> float:
        """Seconds of a step by closed forms, in the best order by closed forms.

        Used to select candidates to simulate.
        """
        return self._best(way)[1]

    def price(self, way: Candidate) -> Priced:
        """Simulate a candidate. Raises ConfigError for one that can't run."""
        if way.stages == 1:
            return self._alone(way)
        check_inside(self.methods[way.strategy], way.replicas)
        order = self._best(way)[0]
        staged = self.staged(way, order)
        grid, stages, exchanges = staged.grid, staged.stages, staged.exchanges
        exchange_s = max(timeline.makespan_s for timeline in exchanges)
        first, last = grid.slowest(way.stages)[0], grid.slowest(way.stages)[-1]
        tied_s = stages.tied_bytes / min(grid.machine.fabric.rates[first][last], grid.machine.fabric.rates[last][first])
        plans = [self._plan_of(way, stages.parts[stage]) for stage in range(way.stages)]
        memory = self.held_bytes(max(stages.memory_bytes(stage, plan) for stage, plan in enumerate(plans)))
        step_s = stages.step_s + exchange_s + tied_s
        exposed_s = stages.timeline.idle_s[0] + exchange_s + tied_s
        sent = stages.sent_bytes(0) + sum(exchanges[0].graph.sent(0).values())
        terms = {
            "step_s": step_s, "compute_s": step_s - exposed_s, "exposed_comm_s": exposed_s,
            "pipeline_s": stages.step_s, "sent_bytes": sent, "peak_rss_bytes": memory,
        }  # fmt: skip
        rates = grid.links(way.stages).rates
        link_s = max(num / rates[a][b] for (a, b), num in stages.link_bytes.items()) + exchange_s
        return Priced(way, step_s, stages.bubble, memory, min(link_s, step_s), order, terms)

    def staged(self, way: Candidate, order: RankOrder) -> Staged:
        """The simulated step of a candidate with stages, its ranks in this order. Raises ConfigError."""
        grid = self.placed(order)
        sizes = (way.stages, way.num_micro_batches, way.micro_batch)
        stages = stages_of(self.model, way.pipeline, *sizes, self.seq_len, grid)
        return Staged(grid, stages, tuple(self._exchange(way, stages, stage, grid) for stage in range(way.stages)))

    def simulated(self, way: Candidate) -> Timeline:
        """The simulated step of a candidate without stages."""
        work = Work(self.layer, self.forward_of(way.micro_batch))
        graph = self.methods[way.strategy].schedule(self.model, self._replicas(way), way.num_micro_batches, work)
        return simulate(graph, self.machine)

    def _alone(self, way: Candidate) -> Priced:
        timeline = self.simulated(way)
        layer, ends = layer_and_ends(self.model.config, self.seq_len)
        kept = way.micro_batch * (len(self.model.model.layers) * layer.kept_bytes + ends.kept_bytes)
        plan = self._plan_of(way, self.model)
        memory = self.held_bytes(sum(plan.memory.values()) + kept)
        step_s, compute_s, kinds = timeline.makespan_s, timeline.busy_s(0, TRAINING), timeline.kinds_s(0)
        terms = {
            "step_s": step_s, "compute_s": compute_s, "exposed_comm_s": step_s - compute_s,
            "codec_s": timeline.busy_s(0, COMMUNICATION) - kinds.get(ROUND, 0.0),
            "sent_bytes": sum(timeline.graph.sent(0).values()), "peak_rss_bytes": memory,
        }  # fmt: skip
        order = self.ranks_of(self.nodes)
        return Priced(way, step_s, 1 - compute_s / step_s, memory, min(self._link_s(way), step_s), order, terms)

    def _link_s(self, way: Candidate) -> float:
        """Seconds of the slowest pair's messages, if all ranks send the same."""
        plan = self._plan_of(way, self.model)
        crossing, fabric, local = plan.sent_on("inter"), self.machine.fabric, self.machine.local_size
        others = max(1, len(self.nodes) - 1)
        pairs = [pair for pair in fabric.pairs if fabric.ports(pair)]
        slowest = min((fabric.rates[a][b] for a, b in pairs), default=math.inf)
        ports = min(fabric.port_rates().values(), default=math.inf)
        of_node = local * crossing if plan.crossing is None else plan.crossing
        return max(crossing / others / slowest, of_node / ports)

    def _best(self, way: Candidate) -> tuple[RankOrder, float]:
        machine, operations = self.machine, 3 * self.forward_of(way.micro_batch)
        busy = machine.cores.slowdown(0, machine.threads * machine.cores.hosts.count(0))
        compute_s = operations / machine.rates[self.layer] * busy / min(machine.speeds or (1.0,))
        if way.stages == 1:
            return self.ranks_of(self.nodes), way.num_micro_batches * compute_s + self._link_s(way)
        key = (way.stages, way.strategy, way.num_micro_batches, way.micro_batch, way.borders)
        if key not in self._orders:
            self._orders[key] = self._searched(way, compute_s)
        return self._orders[key]

    def _searched(self, way: Candidate, compute_s: float) -> tuple[RankOrder, float]:
        """The best order by closed forms, and a step's seconds."""
        machine = self.machine
        features = way.micro_batch * self.seq_len * self.model.config.hidden_size
        crossing, fabric = way.pipeline.crossing(0), machine.fabric
        sizes = [float(crossing.packet_bytes(way_, features, torch.float32)) for way_ in ("forward", "backward")]
        sent = self._plan_of(way, self.model).sent_on("inter") / way.stages / 2 if way.replicas > 1 else 0.0

        def cost(nodes: RankOrder) -> float:
            grid = self.placed(self.ranks_of(nodes))
            trip = max(trip_s(ranks, fabric, *sizes) for ranks in grid.pipelines(way.stages))
            ring = max(ring_s(ranks, fabric, sent) for ranks in grid.groups(way.stages))
            return pipette_s(way.stages, way.num_micro_batches, compute_s / way.stages, trip, ring)

        nodes, seconds = annealed(cost, self.nodes)
        return self.ranks_of(nodes), seconds

    def _replicas(self, way: Candidate) -> Topology:
        """The ranks of one stage."""
        local = min(self.machine.local_size, way.replicas)
        return Topology(way.replicas // local, local) if way.replicas % local == 0 else Topology(way.replicas, 1)

    def _plan_of(self, way: Candidate, part: nn.Module) -> MethodPlan:
        shapes = tuple(param.shape for param in part.parameters())
        key = (way.strategy, way.replicas, way.num_micro_batches, shapes)
        if key not in self._plans:
            self._plans[key] = self.methods[way.strategy].plan(part, self._replicas(way), way.num_micro_batches)
        return self._plans[key]

    def _exchange(self, way: Candidate, stages: Stages, stage: int, grid: PlacedMachine) -> Timeline:
        """The messages between the replicas of a stage after its last backward."""
        nothing = Work(self.layer, 0.0)
        graph = self.methods[way.strategy].schedule(stages.parts[stage], self._replicas(way), 1, nothing)
        return simulate(graph, self.machine.part(grid.groups(way.stages)[stage]))
