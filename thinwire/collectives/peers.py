"""The islands that are present. An island is a world of its own; its first rank talks to the others' first ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S, Communicator
from thinwire.collectives.elastic import Membership
from thinwire.collectives.meter import Meter, MeterReading


class Peers(Protocol):
    """The present islands, as known to an island's first rank.

    Args:
        island: number of this island, which never changes.
        members: numbers of the islands present, ascending, equal on all of them.
        generation: grows with every change of the members.
        comm: communicator over the members, in their order; a new one after a change.
        membership: the last change.
        has_state: whether this island has the state that the members share. One that joins lacks it, and sets this once
            it has got it.
    """

    has_state: bool

    @property
    def island(self) -> int: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def generation(self) -> int: ...

    @property
    def comm(self) -> Communicator: ...

    @property
    def membership(self) -> Membership: ...

    def lost(self) -> bool:
        """Whether a member is known to be lost. Cheap; sends nothing."""
        ...

    def changed(self) -> bool:
        """Whether an island waits to join or is known to be lost. Cheap; sends nothing."""
        ...

    def reached(self, step: int) -> None:
        """Note that this island has taken that step and sent its parts of the exchange after it; sends nothing."""
        ...

    def awaiting(self, step: int) -> AbstractContextManager[None]:
        """Context in which this island waits for the exchange after that step. Cheap; sends nothing."""
        ...

    def renew(self) -> None:
        """Form the next generation with the remaining islands and those that wait. A collective over them."""
        ...

    def close(self) -> None:
        """Leave, and release the resources of the meeting."""
        ...

    def abandon(self) -> None:
        """Leave at once: this island has failed, and the others need not find that out by a timeout."""
        ...


def alone() -> WorldPeers:
    """Peers of an island that is the only one; made by its first rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return WorldPeers()
    return WorldPeers([dist.get_rank()])


class Meters(Meter):
    """The meters of an island and of its peers, read as one."""

    def __init__(self, own: Meter, peers: Peers | None) -> None:
        super().__init__()
        self._peers = peers
        self._parts = [own]

    def snapshot(self) -> MeterReading:
        """The totals so far."""
        # After a renewal the peers have another meter, which starts at zero.
        if self._peers is not None and self._peers.comm.meter not in self._parts:
            self._parts.append(self._peers.comm.meter)
        return sum((meter.snapshot() for meter in self._parts), MeterReading())


class WorldPeers:
    """Peers that are the ranks of a process group, each an island, for the whole run.

    No rank can leave or join a process group. After a loss `renew` raises the communicator's error.

    Args:
        group: None for all ranks.
        timeout_s, checked: see Communicator.
    """

    generation = 0

    def __init__(
        self,
        group: dist.ProcessGroup | Sequence[int] | DeviceMesh | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        checked: bool = False,
    ) -> None:
        self.comm = Communicator(group, local_size=1, timeout_s=timeout_s, checked=checked)
        self.island = self.comm.rank
        self.members = tuple(range(self.comm.world_size))
        self.membership = Membership(0, self.members, (), (), 0.0)
        self.has_state = True

    def lost(self) -> bool:
        """Always False: a loss shows as an error of the next message."""
        return False

    def changed(self) -> bool:
        """Always False."""
        return False

    def reached(self, step: int) -> None:
        """Do nothing: no island goes on without another."""

    def awaiting(self, step: int) -> AbstractContextManager[None]:
        """Do nothing: no island goes on without another."""
        return nullcontext()

    def renew(self) -> None:
        """Wait for the same members."""
        self.comm.barrier()

    def close(self) -> None:
        """Give the process group back."""
        self.comm.close()

    def abandon(self) -> None:
        """Do nothing: the other ranks notice at the next message."""
