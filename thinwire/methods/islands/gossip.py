"""Gossip: neighbours on a graph average in pairs at times of their own, and no rank waits for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.methods.options import check_types
from thinwire.methods.own_pace.graph import Graph, Mixing
from thinwire.methods.own_pace.pairs import PairsMethod


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


@dataclass(frozen=True)
class Gossip(PairsMethod):
    """Train with any optimizer and average in pairs along a graph (A2CiD2).

    Every rank keeps a model of its own. After each `optimizer.step()` it adds the changes that neighbours have sent
    meanwhile; nothing else changes the model. At the end all ranks have the mean.

    `Gossip(model, optimizer, **options)` is the context around your own loop, which all ranks enter. Its other options:
    `group`, `seed`, `timeout_s`, `checked`, `announce`.

    Raises ConfigError for options that can't work or differ between ranks; PeerLostError, in `optimizer.step()`, if a
    neighbour is lost.
    Source: Nabli, Belilovsky and Oyallon, "A2CiD2", NeurIPS 2023.
    """

    name: ClassVar[str] = "gossip"
    num_vectors: ClassVar[int] = 3

    step_s: float = 0.1
    """Seconds of a local step, above 0: the unit of time. Ranks that are faster wait, so that all count alike; those
    that are slower count less."""
    graph: str | tuple[tuple[int, int], ...] = "ring"
    """Which ranks exchange with which: ring, star, complete, or a list of edges such as (0, 1) between two ranks."""
    exchanges_per_step: float = 1.0
    """Exchanges of each rank with a neighbour during one local step, on average; above 0."""
    accelerated: bool = True
    """Use A2CiD2's second vector and its mixing; off: plain averaging in pairs."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_step()
        if not self.exchanges_per_step > 0:
            raise ConfigError(f"exchanges_per_step {self.exchanges_per_step:g}: above 0; 1 is usual")

    def law(self, num_nodes: int) -> A2CiD2:
        return A2CiD2(Graph.of(self.graph, num_nodes), 0.5 * num_nodes * self.exchanges_per_step, self.accelerated)
