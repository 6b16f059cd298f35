"""Which ranks share what: nested groups of s1, s2 and all P ranks, and how shards travel between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.collectives import Topology
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Levels:
    """A grid of P ranks. Weights are cut over each s1 neighbours, gradients over each s2 ranks; s1 | s2 | P.

    A block is s2 consecutive ranks. A flat tensor of n elements has s2 slices; rank i of each block sums the gradients
    of slice i. A column is the P / s2 ranks that share a slice, one from each block. The rank from block q owns piece q
    of
    the slice: n / P elements. A stack is the s2 / s1 ranks of a block with the same rank % s1. All ranks of a stack
    hold the compute weights of all slices of the stack, 1/s1 of the tensor. A rank and its s1 - 1 neighbours together
    hold the whole tensor.
    """

    topology: Topology
    weights_over: int
    gradients_over: int

    @property
    def num_blocks(self) -> int:
        """P / s2: number of ranks in a column."""
        return self.topology.world_size // self.gradients_over

    @property
    def num_rows(self) -> int:
        """s2 / s1: number of ranks in a stack, and of slices in a rank's compute weights."""
        return self.gradients_over // self.weights_over

    @property
    def inside(self) -> str:
        """Name in the meter of the level inside the groups that share whole weights."""
        return "pair" if self.weights_over < self.topology.local_size else "intra"

    def neighbours(self, rank: int) -> range:
        """The s1 ranks that together hold the whole weights."""
        return _around(rank, self.weights_over)

    def block(self, rank: int) -> range:
        """The s2 ranks that together hold the whole gradient."""
        return _around(rank, self.gradients_over)

    def column(self, rank: int) -> range:
        """The ranks with the same slice, one from each block."""
        return range(rank % self.gradients_over, self.topology.world_size, self.gradients_over)

    def stack(self, rank: int) -> range:
        """The ranks of this rank's block with the same compute weights."""
        block = self.block(rank)
        return range(block.start + rank % self.weights_over, block.stop, self.weights_over)

    def piece(self, rank: int) -> int:
        """Number of the rank's 1/P of the elements, in order."""
        return rank % self.gradients_over * self.num_blocks + rank // self.gradients_over


def levels_on(topology: Topology, weights_over: int | None, gradients_over: int | None) -> Levels:
    """The levels with the stated group sizes; None: the size that follows from the grid.

    Raises ConfigError unless s1 divides s2, s2 divides P, and every group is whole nodes or divides a node evenly.
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
