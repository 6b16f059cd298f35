"""Which ranks share what: nested groups of s1, s2 and all P ranks, and who meets whom when shards travel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.collectives import Topology
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Levels:
    """A grid of P ranks with the weights cut over each s1 neighbours and the gradients over each s2; s1 | s2 | P.

    A flat tensor of n elements has s2 slices; slice i belongs to rank i of each block of s2 ranks, which sums gradients
    of it. P / s2 ranks, one in each block, share a slice: a column, block q of which owns its piece q, n / P elements.
    The s2 / s1 ranks of a block with the same rank % s1 are a stack: all of them hold the compute weights of all
    their slices, which are 1/s1 of the tensor; a rank and its s1 - 1 neighbours hold the whole.
    """

    topology: Topology
    weights_over: int
    gradients_over: int

    @property
    def num_blocks(self) -> int:
        """P / s2: ranks in a column."""
        return self.topology.world_size // self.gradients_over

    @property
    def num_rows(self) -> int:
        """s2 / s1: ranks in a stack, slices in a rank's compute weights."""
        return self.gradients_over // self.weights_over

    @property
    def inside(self) -> str:
        """What the meter calls the level inside the groups that share whole weights."""
        return "pair" if self.weights_over < self.topology.local_size else "intra"

    def neighbours(self, rank: int) -> range:
        """The s1 ranks that hold the whole weights between them."""
        return _around(rank, self.weights_over)

    def block(self, rank: int) -> range:
        """The s2 ranks that hold the whole gradient between them."""
        return _around(rank, self.gradients_over)

    def column(self, rank: int) -> range:
        """The ranks with the same slice, one in each block."""
        return range(rank % self.gradients_over, self.topology.world_size, self.gradients_over)

    def stack(self, rank: int) -> range:
        """The ranks of this one's block with the same compute weights."""
        block = self.block(rank)
        return range(block.start + rank % self.weights_over, block.stop, self.weights_over)

    def piece(self, rank: int) -> int:
        """The number of the rank's 1/P, in order of elements."""
        return rank % self.gradients_over * self.num_blocks + rank // self.gradients_over


def levels_on(topology: Topology, weights_over: int | None, gradients_over: int | None) -> Levels:
    """The levels that were asked for, or those that follow from the grid where they are None.

    Raises ConfigError unless s1 divides s2 and s2 divides P, and groups are whole nodes or whole parts of a node.
    """
    local_size, world_size = topology.local_size, topology.world_size
    near = weights_over if weights_over is not None else (2 if local_size % 2 == 0 else 1)
    wide = gradients_over if gradients_over is not None else max(local_size, near)
    fits = [n for n in range(1, world_size + 1) if world_size % n == 0 and (local_size % n == 0 or n % local_size == 0)]
    where = f"a grid of {topology}"
    if near not in fits:
        raise ConfigError(
            f"weights_over {near} of frontier does not fit {where}: must divide its {world_size} ranks, and be a part "
            f"of a node or whole nodes; {_nearest(near, fits)}"
        )
    good = [n for n in fits if n % near == 0]
    if wide not in good:
        raise ConfigError(
            f"gradients_over {wide} of frontier does not fit {where}: must be a multiple of weights_over {near}, "
            f"divide the {world_size} ranks, and be a part of a node or whole nodes; {_nearest(wide, good)}"
        )
    return Levels(topology, near, wide)


def _nearest(value: int, fits: Iterable[int]) -> str:
    listed = list(fits)
    return f"nearest that does: {min(listed, key=lambda n: abs(n - value))} (all: {', '.join(map(str, listed))})"


def _around(rank: int, size: int) -> range:
    start = rank - rank % size
    return range(start, start + size)
