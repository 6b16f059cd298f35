"""The grid of ranks: nodes with the same number of ranks each."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """`num_nodes` nodes of `local_size` ranks; rank = node * local_size + local_rank.

    Links inside a node ("intra") are assumed to be fast, links between nodes ("inter") slow.
    """

    num_nodes: int
    local_size: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.local_size

    def node(self, rank: int) -> int:
        return rank // self.local_size

    def local_rank(self, rank: int) -> int:
        return rank % self.local_size

    def rank(self, node: int, local_rank: int) -> int:
        return node * self.local_size + local_rank

    def subgroup(self, members: Sequence[int]) -> Topology:
        """The grid of some of the ranks: flat if they do not lie node after node, with equal numbers on each."""
        nodes = [self.node(rank) for rank in members]
        local_size = nodes.count(nodes[0])
        if nodes != [node for node in dict.fromkeys(nodes) for _ in range(local_size)]:
            local_size = 1
        return Topology(len(members) // local_size, local_size)

    def __str__(self) -> str:
        return f"{self.num_nodes} node(s) x {self.local_size} rank(s)"

    @classmethod
    def stated(cls, world_size: int, local_size: int) -> Topology:
        """The grid that the user asks for. Raises ConfigError if `local_size` does not divide the world."""
        if local_size < 1 or world_size % local_size:
            fits = [d for d in range(1, world_size + 1) if world_size % d == 0]
            best = min(fits, key=lambda d: abs(d - local_size))
            raise ConfigError(
                f"local size {local_size} does not fit a world of {world_size}: it must divide it; "
                f"nearest that does: {best} (all: {', '.join(map(str, fits))})"
            )
        return cls(world_size // local_size, local_size)

    @classmethod
    def from_labels(cls, labels: Sequence[str]) -> tuple[Topology, str]:
        """The grid derived from one node label per rank, and the reason for it.

        If nodes have unequal sizes, or their ranks are not consecutive, the grid is flat: each rank is its own node.
        """
        world_size = len(labels)
        nodes = list(dict.fromkeys(labels))
        local_size, rest = divmod(world_size, len(nodes))
        expected = [node for node in nodes for _ in range(local_size)]
        if rest or list(labels) != expected:
            return cls(world_size, 1), "nodes hold unequal or scattered ranks, so every rank counts as a node"
        return cls(len(nodes), local_size), f"{len(nodes)} node(s) seen, {local_size} rank(s) on each"


def node_label(global_rank: int) -> str:
    """Label of this process's node: from LOCAL_WORLD_SIZE if a launcher set it, else the host's name."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local_world_size > 0:
        return f"node{global_rank // local_world_size}"
    return socket.gethostname()
