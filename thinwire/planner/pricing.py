"""Prices candidates on measured machines: memory, and the parts of a simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from thinwire.collectives import Topology
from thinwire.collectives.gather import gather_bytes
from thinwire.cost import Machine, Message, Timeline, Work, simulate
from thinwire.cost.machine import LAYER, MIXTURE
from thinwire.hosts.sums import across_of
from thinwire.losses import loss_in_effect
from thinwire.methods.experts import check_data_method
from thinwire.methods.interface import Method, MethodPlan
from thinwire.methods.memory import Across
from thinwire.methods.pipeline.drawn import OPERATION as BETWEEN_STAGES, Joined
from thinwire.methods.pipeline.inside import check_inside
from thinwire.methods.pipeline.options import check_stages
from thinwire.methods.schedule import END, RING, PlannedExchanges, plain
from thinwire.methods.sequence.inside import check_strategy
from thinwire.models import Llama, MoELlama
from thinwire.models.llama import LlamaConfig
from thinwire.optim import WHOLE
from thinwire.options import Tables
from thinwire.planner.attention import AttentionCost, attention_of
from thinwire.planner.candidates import Candidate
from thinwire.planner.cut import cut_model
from thinwire.planner.forward import Forward, dense_of, layer_and_ends
from thinwire.planner.memory import Estimator, Offset, Recorded, features_of
from thinwire.planner.optimizers import ADAMW, COUNTED, by_optimizer
from thinwire.planner.order import RankOrder
from thinwire.planner.parts import work_of
from thinwire.planner.placed import PlacedMachine
from thinwire.planner.search import Priced
from thinwire.planner.stages import Stages, stages_of
from thinwire.registry import check_on_mesh
from thinwire.run.optimizer import name_of, optimizer_over

# The operation of the ranks' word on a step.
WORD = "all_gather_exact"


@dataclass(frozen=True)
class Staged:
    """A simulated step of a candidate with stages. grid: its machines; ranks: of the simulated step, in its order."""

    grid: PlacedMachine
    stages: Stages
    ranks: RankOrder

    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes of a step by (from, to), in the numbers of the simulated step, without the ranks' words on it.

        Those are some bytes between all ranks, and a link with no more counts as one that is not used.
        """
        found, graph = Counter[tuple[int, int]](), self.stages.timeline.graph
        num = graph.num_ranks // len(self.stages.parts)
        for (source, target), num_bytes in self.stages.link_bytes.items():
            for replica in range(num):
                found[source * num + replica, target * num + replica] += num_bytes  # type: ignore[assignment]
        for task in graph.tasks:
            # Of those between stages the simulated step may have a part.
            if isinstance(does := task.does, Message) and not does.operation.startswith((BETWEEN_STAGES, WORD)):
                found[task.rank, does.target] += does.num_bytes  # type: ignore[assignment]
        return dict(found)


@dataclass
class Pricing:
    """Prices candidates for one model on one machine.

    methods: by name of the strategy, and of the method of islands. dtype: the compute type. estimator: of the memory of
    a process. tables: options that are stated. loss: as for `thinwire train`. optimizer: whose state is counted; where
    ranks share experts AdamW's is. reserved_bytes: of a process, what it does not use but a budget counts.
    spreads, orders, groups, wholes: what islands exchange, the best orders of nodes, other groups of ranks than
    machines, and the costs in memory of what may lie on a disk, once they are known.
    """

    model: Llama
    machine: Machine
    methods: Mapping[str, Method]
    seq_len: int
    dtype: str
    estimator: Estimator = field(default_factory=Offset)
    tables: Tables = field(default_factory=dict)
    loss: str = "auto"
    optimizer: str = ADAMW
    reserved_bytes: float = 0.0
    spreads: dict[Hashable, dict[tuple[str, str], int]] = field(default_factory=dict)
    orders: dict[Hashable, RankOrder] = field(default_factory=dict)
    groups: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    wholes: dict[Candidate, Priced] = field(default_factory=dict)
    _parts: dict[Hashable, Pricing] = field(default_factory=dict)
    _cut: dict[int, Llama] = field(default_factory=dict)
    _attentions: dict[Hashable, AttentionCost] = field(default_factory=dict)
    _plans: dict[Hashable, MethodPlan] = field(default_factory=dict)
    _shares: dict[Hashable, list[float]] = field(default_factory=dict)

    @cached_property
    def layer(self) -> str:
        """The kind of work of the model's layers."""
        kind = MIXTURE if isinstance(self.model, MoELlama) else LAYER
        return self.machine.layer(self.model.config.hidden_size, self.dtype, kind)

    @cached_property
    def config(self) -> LlamaConfig:
        """Sizes of a dense model of the same work: a token of a mixture passes through some of its experts."""
        return dense_of(self.model.config)

    @cached_property
    def across(self) -> Across | None:
        """The optimizer with what it looks across in the model; None: it looks across nothing, or is not counted."""
        if name_of(self.optimizer) not in WHOLE:
            return None
        return across_of(optimizer_over(self.optimizer, self.model, lr=0.0, weight_decay=0.0, seed=0), self.model)

    def on(self, ranks: Sequence[int], optimizer: str = "") -> Pricing:
        """The same on some of the ranks. optimizer: that of an island; empty: the same."""
        key = (optimizer, *ranks)
        if key not in self._parts:
            self._parts[key] = replace(
                self, machine=self.machine.part(ranks), optimizer=optimizer or self.optimizer, spreads={},
                orders={}, groups={}, wholes={}, _parts={}, _attentions={}, _plans={},
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
            self._cut[tensor] = cut_model(self.model, tensor)
        return self._cut[tensor]

    def forward_of(self, way: Candidate, order: RankOrder = ()) -> float:
        """Operations of a rank's forward of a micro-batch; what does not depend on these is converted into operations.

        That is a third of the fixed cost of a pass, and of the messages inside its layers, which nothing hides. order:
        the rank in each place; empty: unchanged.
        """
        layer, ends = self.layer_and_ends(way)
        grid = self.placed(order or self.ranks_of(self.nodes), way.tensor)
        num_layers = len(self.model.model.layers)
        operations = way.micro_batch * (num_layers * layer.operations + ends.operations) / way.sequence
        features = way.micro_batch * self.seq_len * self.config.hidden_size / way.sequence
        sum_s = grid.sum_s(4.0 * features, way.tensor)
        inside_s = num_layers * (4 * sum_s + self.attention(way, order).seconds / grid.busy)
        return operations + (grid.pass_s + inside_s) * grid.flops / 3

    def layer_and_ends(self, way: Candidate) -> tuple[Forward, Forward]:
        """The forward of one sequence with a candidate's loss: of one layer, and of all the rest together."""
        loss, _ = loss_in_effect(self.loss, way.micro_batch * self.seq_len, self.config.vocab_size)
        return layer_and_ends(
            self.config, self.seq_len, is_cut=loss == "cut", tensor=way.tensor, dtype=self.dtype
        )  # fmt: skip

    def kept_bytes(self, way: Candidate) -> float:
        """Bytes of the activations of a micro-batch in a model without stages, on one rank."""
        (layer, ends), times = self.layer_and_ends(way), way.micro_batch / way.sequence
        return len(self.model.model.layers) * layer.kept(times) + ends.kept(times)

    def shares(self, way: Candidate) -> list[float]:
        """The share of a micro-batch's operations that each stage computes; together 1."""
        key = (way.stages, way.tensor, way.pipeline)
        if key not in self._shares:
            self._shares[key] = work_of(self.cut(way.tensor), way.pipeline, way.stages, self.seq_len, way.tensor)
        return self._shares[key]

    def check(self, way: Candidate) -> None:
        """Raise ConfigError for a strategy that can't train on a candidate's mesh."""
        method = self.methods[way.strategy]
        if way.tensor > 1:
            check_on_mesh(method)
        if way.sequence > 1:
            check_strategy(method)
        if way.experts > 1:
            check_data_method(method)
        if way.stages > 1:
            layers, features = len(self.model.model.layers), self.model.config.hidden_size
            check_stages(way.pipeline, way.stages, layers, features=features)
            check_inside(method, way.replicas)

    def staged(
        self, way: Candidate, order: RankOrder, more_s: float = 0.0,
        alike: Callable[[nn.Module], nn.Module] = lambda part: part,
    ) -> Staged:  # fmt: skip
        """The simulated step of a candidate with stages, its ranks in this order. Raises ConfigError.

        more_s: seconds that a layer takes beyond those of a dense model, forward and backward. alike: what of a stage
        all of its ranks have.
        """
        grid = self.placed(order, way.tensor)
        sizes = (way.stages, way.num_micro_batches, way.micro_batch)
        inside_s = self.attention(way).seconds / grid.busy + more_s
        stages = stages_of(
            self.cut(way.tensor), way.pipeline, *sizes, self.seq_len, grid, self.loss, way.tensor,
            sequence=way.sequence, inside_s=inside_s, dtype=self.dtype,
            join=lambda parts: self.joined(way, list(map(alike, parts))),
        )  # fmt: skip
        return Staged(grid, stages, order[:: way.tensor])

    def joined(self, way: Candidate, parts: Sequence[nn.Module]) -> Joined:
        """What the replicas of each stage exchange, and the word of all ranks on a step, in place of the replicas'."""
        method, replicas, local = self.methods[way.strategy], self.replicas(way), self.group_of(way)
        everyone = Topology(way.stages * way.sharing // local, local)
        found = [method.exchanges(part, replicas, 1) for part in parts]
        each = [replace(one, each=tuple(own for own in one.each if own.operation != WORD)) for one in found]
        num_told = max(2, way.sharing) - 1
        key = (way.strategy, way.sharing, way.tensor, WORD)
        if key not in self._plans:
            self._plans[key] = method.plan(self.cut(way.tensor), Topology(num_told + 1, 1), 1)
        word = self._plans[key].sent.get((WORD, "inter"), 0) // num_told
        sent = {(WORD, level): num_bytes for level, num_bytes in gather_bytes(everyone, word).items()}
        return Joined(tuple(each), replicas, PlannedExchanges((), tuple(plain(sent, END))), everyone)

    def simulated(self, way: Candidate, order: RankOrder) -> Timeline:
        """The simulated step of a candidate without stages, its ranks in this order."""
        grid, work = self.placed(order, way.tensor), Work(self.layer, self.forward_of(way, order))
        method, model = self.methods[way.strategy], self.cut(way.tensor)
        graph = method.schedule(model, self.replicas(way), way.num_micro_batches, work)
        return simulate(graph, grid.part(grid.groups(1)[0]))

    def group_of(self, way: Candidate) -> int:
        """Ranks that the strategy takes for those of one node; of each tensor axis the first."""
        return (way.group or self.machine.local_size) // way.tensor

    def replicas(self, way: Candidate) -> Topology:
        """The ranks of one stage that the strategy joins."""
        num = way.sharing
        local = min(self.group_of(way), num)
        return Topology(num // local, local) if num % local == 0 else Topology(num, 1)

    def plan_of(self, way: Candidate, part: nn.Module) -> MethodPlan:
        """The strategy's plan of a part of the model, on the ranks that it joins."""
        shapes, grid = tuple(param.shape for param in part.parameters()), self.replicas(way)
        key = (way.strategy, grid, way.tensor, way.num_micro_batches, shapes)
        if key not in self._plans:
            method = self.methods[way.strategy]
            found = method.plan(part, grid, way.num_micro_batches)
            if name_of(self.optimizer) in COUNTED[1:] and way.experts == 1:
                found = by_optimizer(found, method, part, self.optimizer, grid)
            self._plans[key] = found
        return self._plans[key]

    def attention(self, way: Candidate, order: RankOrder = ()) -> AttentionCost:
        """The messages of one layer's attention, if ranks share sequences: of neighbours, in the fastest layout.

        order: the rank in each place; empty: unchanged.
        """
        order = order or self.ranks_of(self.nodes)
        key = (way.sequence, way.tensor, way.micro_batch, order)
        if way.sequence > 1 and key not in self._attentions:
            found = attention_of(self.config, self.machine.part(order), way, self.seq_len)
            sent = {(order[a], order[b]): num_bytes for (a, b), num_bytes in found.sent.items()}
            self._attentions[key] = AttentionCost(found.seconds, sent)
        return self._attentions.get(key, AttentionCost())

    def is_ring(self, way: Candidate) -> bool:
        """Whether the strategy's messages go around a ring of all its ranks, so that only neighbours' links count."""
        made = self.methods[way.strategy].exchanges(self.cut(way.tensor), self.replicas(way), 1)
        return any(hop.to == RING for each in made.each for hop in each.hops)
