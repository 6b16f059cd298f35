"""What an outer loop asks of an island's optimizer, and an exchange under way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire.collectives import Communicator, Peers
from thinwire.methods.islands.exchange import (
    Sync,
)


class Host(Protocol):
    """Whose weights are exchanged: see ParallelOptimizer. comm: the island's ranks; None for one."""

    @property
    def comm(self) -> Communicator | None: ...

    def masters(self, names: Collection[str]) -> dict[str, Tensor]: ...

    def adopt_weights(self, values: Mapping[str, Tensor]) -> None: ...

    def handover_bytes(self, names: Collection[str]) -> tuple[int, int]: ...


@dataclass(eq=False)
class Flight:
    """An exchange under way. due: the step after which its result is taken. sync: known to the island's first rank."""

    fragment: int
    due: int
    sync: Sync | None
    members: tuple[int, ...] = ()
    is_applied: bool = False

    def submit(self, peers: Peers) -> None:
        """Start it among those that are present."""
        assert self.sync is not None
        self.members = peers.members
        self.sync.submit(peers)
