"""The link of a communication job: wire, grid, job number, scratch memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from thinwire.collectives import staging
from thinwire.collectives.exchange import ROUNDS_OF_A_PART, Exchange, Wire
from thinwire.collectives.rounds import Computed, Rounds
from thinwire.collectives.topology import Topology

T = TypeVar("T")


@dataclass
class Link:
    """The resources of one job: the wire, the grid, the job's number in the group, and scratch memory.

    The memory is reused from job to job, but never by two jobs that run at once. pool: threads that pack and unpack CPU
    tensors in place of the communication thread.
    """

    wire: Wire
    topology: Topology
    number: int
    memory: dict[str, Tensor]
    prefix: str = ""
    # The job's rounds have consecutive numbers, also if some of them run among other ranks.
    rounds: Iterator[int] = field(default_factory=itertools.count)
    # The meter's name of the level inside a node.
    inside: str = "intra"
    pool: Executor | None = None

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def node(self) -> int:
        return self.topology.node(self.wire.rank)

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank(self.wire.rank)

    def node_peers(self) -> list[int]:
        """The ranks of the other nodes that have this rank's local rank, next node first."""
        grid = self.topology
        return [grid.rank((self.node + step) % grid.num_nodes, self.local_rank) for step in range(1, grid.num_nodes)]

    def local_peers(self) -> list[int]:
        """The other ranks of this node, next one first."""
        grid = self.topology
        return [grid.rank(self.node, (self.local_rank + step) % grid.local_size) for step in range(1, grid.local_size)]

    def scratch(
        self, name: str, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device = staging.CPU
    ) -> Tensor:
        """A tensor with undefined content. It is valid until the same name is asked for again."""
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        held = self.memory.get(self.prefix + name)
        if held is None or held.numel() < num_bytes or held.device != device:
            held = self.memory[self.prefix + name] = staging.allocate(num_bytes, device)
        return held[:num_bytes].view(dtype).view(shape)

    def part(self, number: int) -> Link:
        """A link for part 0, 1, ... of this job, with its own messages and memory; see `together`."""
        rounds = itertools.count((number + 1) * ROUNDS_OF_A_PART)
        return replace(self, prefix=f"{self.prefix}{number}.", rounds=rounds)

    def exchange(
        self, operation: str, level: str, receives: Mapping[int, Tensor], length: Callable[[Tensor], int] = Tensor.numel
    ) -> Exchange:
        """Begin the job's next round of messages; see Exchange."""
        level = self.inside if level == "intra" else level
        number = next(self.rounds)
        return Exchange(self.wire, self.number, number, operation, level, receives, length, self.scratch)

    def subgroup(self, members: Sequence[int], inside: str = "intra") -> Link:
        """The link restricted to some of the ranks. A collective over it runs among them, with slices in their order.

        Every rank belongs to one such group, all groups have the same size, and all of them run the same collective.
        """
        if list(members) == list(range(self.topology.world_size)):
            return self if inside == self.inside else replace(self, inside=inside)
        grid = self.topology.subgroup(members)
        return replace(self, wire=self.wire.subgroup(members), topology=grid, inside=inside)

    def timed(self, kind: str, operation: str) -> AbstractContextManager[None]:
        """Count the seconds of a block; see Meter."""
        return self.wire.meter.timed(kind, f"{operation} {self.number}")

    def work(self, kind: str, operation: str, task: Callable[[], T]) -> Rounds[T]:
        """Run a task and count its seconds: at once, or on the pool while other jobs go on. Return its result."""

        def timed() -> T:
            with self.timed(kind, operation):
                return task()

        if self.pool is None:
            return timed()
        future = self.pool.submit(timed)
        yield [Computed(future)]
        return future.result()
