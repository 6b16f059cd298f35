"""The base of gossip: neighbours on a graph meet in pairs, and a law defines the effect of a meeting."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from thinwire.collectives import Topology
from thinwire.errors import ConfigError
from thinwire.methods.interface import MethodPlan, trained_shapes
from thinwire.methods.own_pace.base import OwnPaceMethod
from thinwire.methods.own_pace.graph import Graph, Mixing


def meeting_bytes(numel: int, num_nodes: int) -> int:
    """Payload that each side of a meeting sends: a vector in fp32, and a byte for each node."""
    return 4 * numel + num_nodes


class Law(Protocol):
    """The state of a node, and the effect of time and meetings on it. `state` is fp32 [V, n], x first.

    graph: which nodes meet. mixing: effect of time alone on the state. rate: meetings of the whole graph in a unit of
    time.
    """

    @property
    def graph(self) -> Graph: ...

    @property
    def mixing(self) -> Mixing: ...

    @property
    def rate(self) -> float: ...

    def start(self, x: Tensor) -> Tensor:
        """The state of a node that starts with x, fp32 [n]."""
        ...

    def message(self, state: Tensor) -> Tensor:
        """The message to a neighbour: fp32 [n], a copy."""
        ...

    def meet_(self, state: Tensor, difference: Tensor) -> None:
        """Change the state at a meeting, in place.

        Args:
            state: fp32 [V, n].
            difference: this node's message minus the neighbour's, fp32 [n]; the neighbour gets the opposite.
        """
        ...


class GradientLaw(Law, Protocol):
    """A law that takes gradient steps itself."""

    def gradient_(self, state: Tensor, gradient: Tensor) -> None:
        """Change the state by a gradient, in place.

        Args:
            state: fp32 [V, n].
            gradient: of the node's function at x, fp32 [n].
        """
        ...


class PairsMethod(OwnPaceMethod):
    """A method in which ranks meet their neighbours on a graph in pairs, by a law; a GradientLaw if `brings_step`.

    graph, step_s: options of all such methods; step_s is the unit of time.
    """

    graph: str | tuple[tuple[int, int], ...]
    step_s: float

    def law(self, num_nodes: int) -> Law:
        """The law for a graph of `num_nodes` nodes. Raises ConfigError if the options can't work."""
        raise NotImplementedError

    def check_step(self) -> None:
        """Raise ConfigError if step_s is not above 0."""
        if not self.step_s > 0:
            raise ConfigError(f"step_s {self.step_s:g}: the seconds of one local step, above 0")

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """Bytes of the meetings in a unit of time, one local step, averaged over all ranks.

        The clock decides when they happen.
        """
        size = topology.world_size
        numel = sum(shape.numel() for shape in trained_shapes(model).values())
        sent = round(2 * self.law(size).rate / size * meeting_bytes(numel, size))
        return self.whole_plan(model, {("gossip", "inter"): sent})
