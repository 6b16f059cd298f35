"""Which nodes gossip with each other, and when: a graph, its two constants, and the meetings, the same on all nodes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.errors import ConfigError, nearest

Edge = tuple[int, int]
GRAPHS = ("complete", "ring", "star")


@dataclass(frozen=True)
class Meeting:
    """Two neighbours exchange a message: its number among all meetings of the graph, and its time in units."""

    number: int
    time: float
    edge: Edge


@dataclass(frozen=True)
class Graph:
    """A connected graph of nodes 0, 1, ...; each edge (i, j), i < j, once.

    A meeting takes place on a random edge, all equally likely: Lap = (1/|E|) sum over edges of (e_i - e_j)(e_i -
    e_j)^T. Raises ConfigError for edges to nodes that don't exist, and for edges that do not connect all nodes.
    """

    num_nodes: int
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for i, j in self.edges:
            if not 0 <= i < j < self.num_nodes:
                raise ConfigError(f"edge ({i}, {j}): two nodes from 0 to {self.num_nodes - 1}, the lower one first")
        if self.num_nodes < 2 or float(self._eigenvalues[1]) < 1e-9:
            raise ConfigError(f"the edges {list(self.edges)} do not connect {self.num_nodes} nodes, at least 2 in all")

    @classmethod
    def of(cls, graph: str | Sequence[Edge], num_nodes: int) -> Graph:
        """A graph by name, "ring", "star" (node 0 in the middle) or "complete", or from its edges."""
        if not isinstance(graph, str):
            return cls(num_nodes, tuple(sorted({(min(edge), max(edge)) for edge in graph})))
        nodes = range(num_nodes)
        by_name = {
            "ring": [(i, (i + 1) % num_nodes) for i in nodes if num_nodes > 1],
            "star": [(0, i) for i in nodes[1:]],
            "complete": [(i, j) for j in nodes for i in range(j)],
        }
        if graph not in by_name:
            raise ConfigError(f"graph {graph!r}{nearest(graph, GRAPHS)}, or give a list of edges")
        return cls.of(by_name[graph], num_nodes)

    @cached_property
    def laplacian(self) -> Tensor:
        """Lap, fp64 [n, n]."""
        total = torch.zeros(self.num_nodes, self.num_nodes, dtype=torch.float64)
        for edge in self.edges:
            total += torch.outer(*[self._across(edge)] * 2) / len(self.edges)
        return total

    @cached_property
    def chi1(self) -> float:
        """1 / (smallest positive eigenvalue of Lap): how slowly information reaches all nodes."""
        return 1 / float(self._eigenvalues[1])

    @cached_property
    def chi2(self) -> float:
        """The largest 0.5 (e_i - e_j)^T pinv(Lap) (e_i - e_j) of an edge: its resistance; at most chi1."""
        inverse = torch.linalg.pinv(self.laplacian)
        return max(0.5 * float(self._across(edge) @ inverse @ self._across(edge)) for edge in self.edges)

    def meetings(self, rate: float, seed: int) -> Iterator[Meeting]:
        """Yield meetings without end, at Poisson times, `rate` of them in a unit of time, each on a random edge."""
        # Only `random`, whose bits are the same in every Python.
        draw = random.Random(seed).random
        time, number = 0.0, 0
        while True:
            time -= math.log(1.0 - draw()) / rate
            yield Meeting(number, time, self.edges[int(draw() * len(self.edges))])
            number += 1

    @cached_property
    def _eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self.laplacian)

    def _across(self, edge: Edge) -> Tensor:
        direction = torch.zeros(self.num_nodes, dtype=torch.float64)
        direction[edge[0]], direction[edge[1]] = 1.0, -1.0
        return direction


class Mixing:
    """expm(A s) for one constant matrix A, applied to vectors side by side.

    matrix: fp64 [V, V]. Eigenvectors would be faster, but wrong if A has no independent ones.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def after(self, duration: float) -> Tensor:
        """expm(A s), fp64 [V, V]."""
        return torch.linalg.matrix_exp(self.matrix * duration)

    def apply_(self, state: Tensor, duration: float) -> None:
        """state <- expm(A s) state, for [V, n], in its dtype."""
        state.copy_(self.after(duration).to(state.dtype) @ state)
