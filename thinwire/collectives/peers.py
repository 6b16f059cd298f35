"""Which islands are there: an island is a world of its own, and its first rank meets those of the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives.communicator import DEFAULT_TIMEOUT_S, Communicator
from thinwire.collectives.elastic import Membership
from thinwire.collectives.meter import Meter, MeterReading


class Peers(Protocol):
    """What an island's first rank knows of the islands that are present.

    island: this one's number, which stays. members: those present, ascending, equal on all of them. generation: grows
    with every change of the members. comm: over the members, in their order; another one after a change. membership:
    what has changed last. has_state: whether this island has what the members share; one that joins lacks it, and sets
    it when it has got it.
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
        """Whether a member is known to be gone; cheap, and asks nobody."""
        ...

    def changed(self) -> bool:
        """Whether somebody waits to join, or is known to be lost; cheap, and asks nobody."""
        ...

    def reached(self, step: int) -> None:
        """This island has taken that step, and sent its parts of what is exchanged after it; cheap, and asks nobody."""
        ...

    def awaiting(self, step: int) -> AbstractContextManager[None]:
        """Inside, this island stands still for what is exchanged after that step; cheap, and asks nobody."""
        ...

    def renew(self) -> None:
        """Meet those that are left and those that wait: the next generation; a collective of them."""
        ...

    def close(self) -> None:
        """Leave, and give back what the meeting took."""
        ...

    def abandon(self) -> None:
        """Leave at once, whatever is under way: this island has failed, and the others need not find that out."""
        ...


def alone() -> WorldPeers:
    """The peers of an island that is the only one; made by its first rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return WorldPeers()
    return WorldPeers(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))


class Meters(Meter):
    """The meters of an island and of its peers, read as one."""

    def __init__(self, own: Meter, peers: Peers | None) -> None:
        super().__init__()
        self._peers = peers
        self._parts = [own]

    def snapshot(self) -> MeterReading:
        """The totals so far."""
        # Peers that have met anew have another one, which starts at nothing.
        if self._peers is not None and self._peers.comm.meter not in self._parts:
            self._parts.append(self._peers.comm.meter)
        return sum((meter.snapshot() for meter in self._parts), MeterReading())


class WorldPeers:
    """The ranks of a process group, each an island, from the start to the end.

    group: None for all ranks. timeout_s, checked: see Communicator. Nobody can leave or join a process group: after a
    loss `renew` raises what its communicator raised.
    """

    generation = 0

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
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
        """Never: a message that does not come says so."""
        return False

    def changed(self) -> bool:
        """Never."""
        return False

    def reached(self, step: int) -> None:
        """Nothing: nobody goes on without another."""

    def awaiting(self, step: int) -> AbstractContextManager[None]:
        """Nothing: nobody goes on without another."""
        return nullcontext()

    def renew(self) -> None:
        """Wait for the same members."""
        self.comm.barrier()

    def close(self) -> None:
        """Give the process group back."""
        self.comm.close()

    def abandon(self) -> None:
        """Nothing: who is gone from a process group is missed at the next message."""
