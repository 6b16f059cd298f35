"""Gossip: neighbours on a graph average in pairs, each when its time has come, and nobody waits for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.interface import MethodPlan, trained_shapes
from thinwire.methods.islands.graph import Graph, Mixing
from thinwire.methods.islands.own_pace import OwnPaceMethod
from thinwire.methods.options import check_types


def meeting_bytes(numel: int, num_nodes: int) -> int:
    """Payload that each side of a meeting sends: a vector in fp32, and a byte for each node."""
    return 4 * numel + num_nodes


class Law(Protocol):
    """What one method of gossip keeps on a node and does at a meeting; `state` is fp32 [V, n], x first.

    graph: who meets whom. mixing: what time alone does to the state. rate: meetings of the whole graph in a unit of
    time.
    """

    @property
    def graph(self) -> Graph: ...

    @property
    def mixing(self) -> Mixing: ...

    @property
    def rate(self) -> float: ...

    def start(self, x: Tensor) -> Tensor:
        """The state of a node that begins at x, fp32 [n]."""
        ...

    def message(self, state: Tensor) -> Tensor:
        """What a node tells its neighbour: fp32 [n], a copy."""
        ...

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        """Take in (own message) - (the neighbour's); the neighbour takes in the opposite."""
        ...


@dataclass(frozen=True, eq=False)
class A2CiD2:
    """Two vectors a node, x and x~, and any optimizer: the form of gossip for neural networks.

        x' = eta (x~ - x),  x~' = eta (x - x~)                          in between
        x += u,  x~ += u                                                for an optimizer's update u
        x_i -= (x_i - x_j) / 2,  x~_i -= alpha~ (x_i - x_j)             at a meeting of i and j

    eta = 1 / (2 sqrt(chi1 chi2)), alpha~ = sqrt(chi1 / chi2) / 2, for the constants of the graph at `rate` meetings in
    a unit of time. accelerated: else eta = 0 and alpha~ = 1/2, plain averaging in pairs. Means over nodes of x and x~
    stay equal, and only updates change them.

    Source: Nabli, Belilovsky and Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep
    Learning", NeurIPS 2023.
    """

    graph: Graph
    rate: float
    accelerated: bool = True

    @property
    def eta(self) -> float:
        """How fast x and x~ approach each other, per unit of time."""
        return 0.5 * self.rate / math.sqrt(self.graph.chi1 * self.graph.chi2) if self.accelerated else 0.0

    @property
    def alpha_tilde(self) -> float:
        """How far x~ goes at a meeting; x goes half of the way."""
        return 0.5 * math.sqrt(self.graph.chi1 / self.graph.chi2) if self.accelerated else 0.5

    @property
    def mixing(self) -> Mixing:
        return Mixing(self.eta * torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))

    def start(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])

    def message(self, state: Tensor) -> Tensor:
        return state[0].clone()

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        state[0].sub_(difference, alpha=0.5)
        state[1].sub_(difference, alpha=self.alpha_tilde)


class GossipMethod(OwnPaceMethod):
    """What methods of gossip share: a graph, a unit of time, and a law. graph, step_s: options of all of them."""

    graph: str | tuple[tuple[int, int], ...]
    step_s: float

    def law(self, num_nodes: int) -> Law:
        """What a node keeps and does at a meeting; raises ConfigError where the options can't work."""
        raise NotImplementedError

    def check_step(self) -> None:
        """Raise ConfigError where the unit of time is none."""
        if not self.step_s > 0:
            raise ConfigError(f"step_s {self.step_s:g}: the seconds of one local step, above 0")

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Meetings in a unit of time, one local step, on average over all ranks; the clock decides when."""
        size = topology.world_size
        numel = sum(shape.numel() for shape in trained_shapes(model).values())
        sent = round(2 * self.law(size).rate / size * meeting_bytes(numel, size))
        return self.whole_plan(model, {("gossip", "inter"): sent})


@dataclass(frozen=True)
class Gossip(GossipMethod):
    """Train with any optimizer and average in pairs along a graph (A2CiD2).

    Every rank keeps a model of its own. After each `optimizer.step()` it takes over what it has learnt from its
    neighbours meanwhile; nothing else changes the model. At the end all ranks have the mean.

    `Gossip(model, optimizer, **options)` is the context around a loop of one's own, which all ranks enter. Its other
    options: `group`, `seed`, `timeout_s`, `checked`, `announce`.

    Raises ConfigError for options that can't work or differ between ranks; PeerLostError, in `optimizer.step()`, where
    a neighbour is lost.
    Source: Nabli, Belilovsky and Oyallon, "A2CiD2", NeurIPS 2023.
    """

    name: ClassVar[str] = "gossip"
    num_vectors: ClassVar[int] = 3

    step_s: float = 0.1
    """Seconds of a local step, above 0: the unit of time. Ranks that are faster wait, so that all count alike; those
    that are slower count less."""
    graph: str | tuple[tuple[int, int], ...] = "ring"
    """Which ranks exchange with which: ring, star, complete, or a list of edges such as (0, 1) between two ranks."""
    meetings_per_step: float = 1.0
    """Exchanges of each rank with a neighbour during one local step, on average; above 0."""
    accelerated: bool = True
    """Use A2CiD2's second vector and its mixing; off: plain averaging in pairs."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_step()
        if not self.meetings_per_step > 0:
            raise ConfigError(f"meetings_per_step {self.meetings_per_step:g}: above 0; 1 is usual")

    def law(self, num_nodes: int) -> A2CiD2:
        return A2CiD2(Graph.of(self.graph, num_nodes), 0.5 * num_nodes * self.meetings_per_step, self.accelerated)
