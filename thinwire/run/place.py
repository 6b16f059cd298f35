"""The place of a process among those that train together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class IslandPlace(NamedTuple):
    """One of the islands that train together. meet: HOST:PORT where their first ranks meet.

    Empty if there is only one.
    """

    number: int = 0
    num_islands: int = 1
    meet: str = ""


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this process in its process group: all ranks, or those of its island."""

    rank: int
    local_rank: int
    world_size: int
    island: IslandPlace = field(default_factory=IslandPlace)

    @classmethod
    def from_environment(cls) -> ProcessPlace | None:
        """The place that torchrun's agent states; None outside of torchrun."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        if not set(names) <= os.environ.keys():
            return None
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
        return cls(rank, local_rank, world_size)

    def ordered(self, order: Sequence[int]) -> ProcessPlace:
        """This process's place if order[i] is the rank in place i; empty: unchanged."""
        return replace(self, rank=order.index(self.rank)) if order else self

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all islands."""
        return self.world_size * self.island.num_islands

    @property
    def number(self) -> int:
        """Number of this rank among the ranks of all islands."""
        return self.island.number * self.world_size + self.rank

    @property
    def is_first_of_machine(self) -> bool:
        """Whether this is the first process of its machine, in a run without islands on several machines."""
        return self.local_rank == 0 and self.rank > 0 and self.island.num_islands == 1
