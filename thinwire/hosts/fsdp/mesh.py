"""Groups of ranks of a model that FSDP2 shards: those that share a parameter, those with the same part, all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.distributed.tensor import DTensor

from thinwire._compat.fsdp import FSDPGroup
from thinwire.collectives import Communicator, Topology
from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Some ranks of a communicator, along one dimension of its mesh.

    members: their ranks in the communicator. grid: their place on nodes.
    """

    comm: Communicator
    members: Sequence[int]
    grid: Topology

    @classmethod
    def of(cls, comm: Communicator, global_ranks: Sequence[int]) -> RankGroup:
        """The group of these global ranks."""
        members = [comm.global_ranks.index(rank) for rank in global_ranks]
        if len(members) == comm.world_size:
            return cls(comm, members, comm.topology)
        return cls(comm, members, Topology.from_labels([str(comm.topology.node(rank)) for rank in members])[0])

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def global_ranks(self) -> list[int]:
        """Global ranks of the members."""
        return [self.comm.global_ranks[rank] for rank in self.members]

    def link(self, link: Link) -> Link:
        """The communicator's link restricted to these ranks. A collective over it runs among them."""
        if self.size == self.comm.world_size:
            return link
        return replace(link, wire=link.wire.subgroup(self.members), topology=self.grid)

    def submit(self, job: Callable[[Link], Rounds[T]]) -> Future[T]:
        """Run `job` among these ranks; see Communicator."""
        return self.comm.submit(lambda link: job(self.link(link)))


def mesh_ranks(groups: Sequence[FSDPGroup]) -> list[int]:
    """The global ranks of the whole mesh, the tensor axis included.

    Raises ConfigError if parts of the model are sharded over different ranks.
    """
    first = groups[0]
    for group in groups:
        if (group.shard_ranks, group.replica_ranks) != (first.shard_ranks, first.replica_ranks):
            raise ConfigError(
                "the model's parameters are sharded over several meshes: compress each part with its own call"
            )
    params = [param.sharded for group in groups for param in group.params]
    meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
    largest = max(meshes, key=lambda mesh: mesh.mesh.numel())
    return first.shard_ranks if largest.mesh.numel() == len(first.shard_ranks) else largest.mesh.flatten().tolist()
