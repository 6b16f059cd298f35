"""A measured machine with a rank in each place of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinwire.cost import Machine, Network, Work
from thinwire.cost.closed import trip_s
from thinwire.cost.machine import LAYER, launch_of
from thinwire.methods.options import EXACT, FP32
from thinwire.methods.pipeline import Costs
from thinwire.methods.pipeline.across import STAGES as ACROSS_STAGES
from thinwire.methods.pipeline.options import Pipeline
from thinwire.planner.order import RankOrder
from thinwire.planner.stages import Grid

# What the two ends of a border do to a packet.
PACKING = ("encode", "decode")


def groups_of(order: Sequence[int], stages: int, tensor: int = 1) -> list[list[int]]:
    """The ranks of each stage, of ranks in this order; of each tensor axis the first."""
    size = len(order) // stages
    return [list(order[stage * size : (stage + 1) * size : tensor]) for stage in range(stages)]


@dataclass(frozen=True)
class PlacedMachine(Grid):
    """A measured machine with a rank in each place; ranks of a tensor axis are neighbours, then replicas. See Grid.

    pass_s: seconds of a pass through all layers, forward and backward, that don't depend on the number of operations.
    tensor: ranks over which matrices are cut. The first of them stands for the others, which do the same.
    """

    machine: Machine = field(kw_only=True)
    order: RankOrder = field(kw_only=True)
    pass_s: float = field(kw_only=True)
    tensor: int = field(default=1, kw_only=True)

    @classmethod
    def of(cls, machine: Machine, order: RankOrder, layer: str, num_layers: int, tensor: int = 1) -> PlacedMachine:
        """The machine with ranks in this order. layer: the kind of work of the model's layers."""
        local, launch = machine.local_size, machine.rates.get(launch_of(layer), math.inf)
        flops, nodes = machine.rates[layer], machine.num_ranks // local
        pairs = [(order[at], order[at + 1]) for at in range(0, len(order) - 1) if (at + 1) % tensor]
        rate = min((machine.fabric.rates[a][b] for a, b in pairs), default=math.inf)
        delay_s = max((machine.fabric.delays_s[a][b] for a, b in pairs), default=0.0)
        return cls(
            nodes, local, flops, None, rate, delay_s, machine=machine, order=order, pass_s=num_layers / launch,
            tensor=tensor,
        )  # fmt: skip

    def pipelines(self, stages: int) -> list[list[int]]:
        """The ranks of each pipeline, in order of its stages."""
        return [list(ranks) for ranks in zip(*self.groups(stages), strict=True)]

    def groups(self, stages: int) -> list[list[int]]:
        """The ranks of each stage."""
        return groups_of(self.order, stages, self.tensor)

    @property
    def busy(self) -> float:
        """How much longer work takes while all ranks compute, on the machine where that is most: all wait for it."""
        cores, threads = self.machine.cores, self.machine.threads_of(LAYER, trains=True)
        return max(cores.slowdown(host, threads * cores.hosts.count(host)) for host in set(cores.hosts))

    def sum_s(self, num_bytes: float, tensor: int) -> float:
        # It stands in the midst of work, which shared cores make longer; waiting does not become longer.
        return super().sum_s(num_bytes, tensor) / self.busy

    def part(self, ranks: Sequence[int]) -> Machine:
        """Some ranks, while the others of their tensor axes send as much as they do."""
        found = self.machine.part(ranks)
        nodes = found.network.nodes
        rates = tuple(
            tuple(rate if nodes[a] == nodes[b] else rate / self.tensor for b, rate in enumerate(row))
            for a, row in enumerate(found.network.rates)
        )
        return replace(found, network=replace(found.network, rates=rates))

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

    def machine_of(self, stages: int, across: str, tensor: int, *, twins: bool = False) -> Machine:
        """The ranks of all pipelines, stage by stage; of each tensor axis the first."""
        return self.part(self.order[:: self.tensor])

    def codecs(self, options: Pipeline) -> dict[str, str]:
        stated = {"forward": options.forward, "backward": options.backward}
        return {way: codec for way, codec in stated.items() if codec not in (EXACT, FP32)}

    def launched(self, found: Costs) -> Costs:
        launch_s = self.pass_s / len(found.forward_s) / 3
        forward_s, input_s, weight_s = (
            tuple(own + launch_s for own in seconds) for seconds in (found.forward_s, found.input_s, found.weight_s)
        )
        return replace(found, forward_s=forward_s, input_s=input_s, weight_s=weight_s)

    def costs(self, found: Costs, options: Pipeline, stages: int) -> Costs:
        ranks, home, packing = self.slowest(stages), options.home(stages), {"forward": 0.0, "backward": 0.0}
        for way, codec in self.codecs(options).items():
            size = getattr(found, f"{way}_bytes")[0]
            packing[way] = sum(self.machine.seconds(ranks[0], Work(f"{kind} {codec}", size)) for kind in PACKING)
        speeds = self.machine.speeds or (1.0,) * self.num_ranks

        def on(seconds: Sequence[float], more_s: float = 0.0) -> tuple[float, ...]:
            return tuple(own / speeds[ranks[rank]] + more_s for own, rank in zip(seconds, home, strict=True))

        # All wait for the slowest.
        slowest = min(speeds[rank] for rank in ranks)
        spread = {kind: seconds / slowest for kind, seconds in found.spread.seconds.items()}
        return replace(
            found, spread=replace(found.spread, seconds=spread), weight_s=on(found.weight_s),
            forward_s=on(found.forward_s, packing["forward"]), input_s=on(found.input_s, packing["backward"]),
        )  # fmt: skip
