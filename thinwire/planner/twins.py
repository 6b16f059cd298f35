"""The replicas of a stage on machines that are all alike: one on another machine stands for all the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from thinwire.collectives import Topology
from thinwire.cost import Work, simulate
from thinwire.cost.graph import SECONDS
from thinwire.methods.interface import Method
from thinwire.methods.pipeline.across import STAGES
from thinwire.methods.pipeline.drawn import Joined
from thinwire.methods.schedule import ALL, Hop, PlannedExchanges, draw
from thinwire.planner.stages import Grid

TWO = Topology(2, 1)


@dataclass(frozen=True)
class Twins:
    """A method on the replicas of a stage."""

    method: Method
    replicas: Topology

    def exchanges(self, model: nn.Module, grid: Grid, micro_batches: int = 1) -> PlannedExchanges:
        """What a rank exchanges with its twin, which stands for the replicas on other machines.

        Inside a machine, messages take the seconds of one rank's link. Packing takes none: nobody has measured it. Of a
        ring, and of what the first ranks of machines send, all ranks of a machine together pass on what one sends.
        """

        def own(hop: Hop) -> Hop:
            if hop.level == "inter":
                return Hop("inter", hop.num_bytes / (1 if hop.to == ALL else self.replicas.local_size))
            return Hop(hop.level, 0.0, unpacks=Work(SECONDS, hop.num_bytes / (grid.local_rate or math.inf)))

        found = self.method.exchanges(model, self.replicas, micro_batches)
        each = tuple(replace(one, hops=tuple(map(own, one.hops))) for one in found.each)
        return replace(found, each=each, kept_bytes=0.0)

    def join(self, grid: Grid, parts: Sequence[nn.Module]) -> Joined:
        """What the ranks of each stage exchange with their twins."""
        return Joined(tuple(self.exchanges(part, grid) for part in parts), TWO)

    def step_s(self, model: nn.Module, grid: Grid, forward_s: float, micro_batches: int) -> float:
        """Seconds of a step without stages.

        forward_s: of a micro-batch; a backward takes twice as long. Micro-batches between the first and the last send
        nothing.
        """
        num = min(2, micro_batches)
        graph = draw(self.exchanges(model, grid, micro_batches), TWO, num, Work(SECONDS, forward_s))
        machine = grid.machine_of(1, STAGES, 1, twins=True)
        return simulate(graph, machine).makespan_s + 3 * forward_s * (micro_batches - num)
