"""The nodes and stages through which micro-batches that skip stages can pass, and the costs.

Source: "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous Networks" (2025),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.cost import Network
from thinwire.errors import ConfigError
from thinwire.methods.pipeline.costs import Costs
from thinwire.methods.pipeline.fitted import fitted
from thinwire.methods.pipeline.plan import Plan
from thinwire.methods.pipeline.simulate import simulate

# A visit below the furthest stage so far is a swap: how far back one goes, and all of a path together.
SWAP, SWAPS = 1, 2
# How far beyond the furthest stage so far a path may go.
JUMP = 4


def problem_of(stages: Sequence[int]) -> str:
    """What is wrong with a path that visits these stages and then returns for the head; empty if nothing is."""
    if not stages or stages[0] != 0:
        return "must start at stage 0"
    if len(set(stages)) < len(stages):
        return "visits a stage twice"
    furthest = back = 0
    for stage in stages[1:]:
        if furthest - stage > SWAP:
            return f"goes back by {furthest - stage} stages: at most {SWAP}"
        if stage - furthest > JUMP:
            return f"jumps over {stage - furthest - 1} stages: at most {JUMP - 1}"
        back += max(0, furthest - stage)
        furthest = max(furthest, stage)
    return f"swaps stages {back} times: at most {SWAPS}" if back > SWAPS else ""


@dataclass(frozen=True)
class Ground:
    """Nodes, each with the layers of one stage: chunk i is on rank i. After them, for each start, its head.

    Attributes:
        stages: of each node. Nodes of stage 0 are starts, and their heads are chunks n, n + 1, ...
        costs: of all these chunks.
        network: of the nodes.
        memory: most micro-batches that a node takes of one wave; None: an even share of all visits.
    """

    stages: tuple[int, ...]
    costs: Costs
    network: Network
    memory: int | None = None

    def __post_init__(self) -> None:
        if sorted(set(self.stages)) != list(range(self.num_stages)):
            raise ConfigError(f"stages of nodes {self.stages}: each from 0 to {max(self.stages)} needs a node")
        if len(self.costs.forward_s) != len(self.home):
            raise ConfigError(f"costs of {len(self.costs.forward_s)} chunks for {len(self.home)}: nodes, then heads")

    @property
    def num_stages(self) -> int:
        return max(self.stages) + 1

    @property
    def starts(self) -> list[int]:
        """The nodes of stage 0."""
        return [node for node, stage in enumerate(self.stages) if stage == 0]

    @property
    def home(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        return (*range(len(self.stages)), *self.starts)

    def head(self, start: int) -> int:
        """The chunk of a start's head."""
        return len(self.stages) + self.starts.index(start)

    def capacity(self, num_paths: int, length: int) -> dict[int, int]:
        """For each stage but the first, how many of a wave's paths may visit it (rule TC1)."""
        fair = math.ceil(num_paths * (length - 1) / (self.num_stages - 1)) if self.num_stages > 1 else 0
        sizes = {stage: self.stages.count(stage) for stage in range(1, self.num_stages)}
        return {stage: fair if self.memory is None else self.memory * size for stage, size in sizes.items()}

    def least(self, num_paths: int, length: int) -> dict[int, int]:
        """For each stage but the first, how many of a wave's paths visit it at least, so that no stage starves."""
        even = num_paths * (length - 1) // (self.num_stages - 1) if self.num_stages > 1 else 0
        return {stage: min(even, most) for stage, most in self.capacity(num_paths, length).items()}

    def node_capacity(self, stage: int, num_paths: int, length: int) -> int:
        """How many of a wave's paths may visit one node of a stage."""
        if self.memory is not None:
            return self.memory
        return math.ceil(self.capacity(num_paths, length)[stage] / self.stages.count(stage))

    def there_s(self, source: int, target: int) -> float:
        """Seconds of a hidden state from node to node."""
        return self._link_s(source, target, self.costs.forward_bytes[source])

    def back_s(self, source: int, target: int) -> float:
        """Seconds of its gradient, from the target back to the source."""
        return self._link_s(target, source, self.costs.backward_bytes[source])

    def _link_s(self, source: int, target: int, num_bytes: float) -> float:
        if source == target:
            return 0.0
        return self.network.delays_s[source][target] + num_bytes / self.network.rates[source][target]

    def plan_of(self, paths: Sequence[Sequence[int]], in_flight: int | None = None) -> Plan:
        """The plan of micro-batches that visit these nodes and then their start's head.

        in_flight: see `fitted`; None: twice the number of nodes, or as many more as paths that cross need.
        """
        whole = [(*path, self.head(path[0])) for path in paths]
        most = 2 * len(self.stages) if in_flight is None else in_flight
        while True:
            try:
                return fitted(self.home, whole, self.costs, self.network, in_flight=most)
            except ConfigError:
                # Paths that cross may wait for each other: the fewest that let all go on.
                if in_flight is not None or most >= len(paths):
                    raise
                most += 1

    def makespan_s(self, paths: Sequence[Sequence[int]], in_flight: int | None = None) -> float:
        """Seconds of a step in which micro-batches visit these nodes, by `simulate`."""
        return simulate(self.plan_of(paths, in_flight), self.costs, self.network).makespan_s
