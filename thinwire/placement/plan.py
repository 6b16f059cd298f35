"""A placement in the form that ranks follow: ordered units, tensors that travel between them, the step as a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from thinwire.cost import Drawing, Message, Network, StepGraph, Work
from thinwire.placement.profile import Profile, mapped
from thinwire.placement.trace import Traced

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class DevicePlan:
    """Which rank runs which units, in which order.

    units: names of nodes that run one after the other, in one order for all ranks. Each rank runs its own units in that
    order, and their backwards in the opposite order. homes: the rank of each unit.
    """

    units: tuple[tuple[str, ...], ...]
    homes: tuple[int, ...]

    def encoded(self, names: Sequence[str]) -> torch.Tensor:
        """The unit and the rank of each node, int64 [2, nodes]."""
        unit_of = {name: number for number, unit in enumerate(self.units) for name in unit}
        return torch.tensor([[unit_of[name] for name in names], [self.homes[unit_of[name]] for name in names]])

    @classmethod
    def decoded(cls, numbers: torch.Tensor, names: Sequence[str]) -> DevicePlan:
        """The plan from the result of `encoded`."""
        units: dict[int, list[str]] = defaultdict(list)
        homes: dict[int, int] = {}
        for name, unit, home in zip(names, *numbers.tolist(), strict=True):
            units[unit].append(name)
            homes[unit] = home
        return cls(tuple(tuple(units[unit]) for unit in sorted(units)), tuple(homes[unit] for unit in sorted(units)))


@dataclass(frozen=True)
class CrossingTensor:
    """A tensor that other units take, or that the model returns.

    takers: the units that take it, in the plan's order. targets: the ranks it is sent to, each once. senders: the ranks
    that send a gradient back, each the sum over its units.
    """

    number: int
    node: str
    unit: int
    home: int
    takers: tuple[int, ...]
    targets: tuple[int, ...]
    senders: tuple[int, ...]
    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool
    is_output: bool

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient's message, which begins with a byte that says whether there is a gradient."""
        return 1 + self.num_bytes


@dataclass(frozen=True)
class DeviceRoutes:
    """The tensors that travel between the units of a plan. num_ranks: of one copy.

    training: whether a backward follows.
    """

    traced: Traced
    profile: Profile
    plan: DevicePlan
    num_ranks: int
    training: bool

    @cached_property
    def unit_of(self) -> dict[str, int]:
        return {name: number for number, unit in enumerate(self.plan.units) for name in unit}

    @cached_property
    def output_nodes(self) -> list[str]:
        """The nodes that the model returns."""
        found: list[str] = []
        mapped(self.traced.output, lambda node: found.append(node.name), fx.Node)
        return [name for name in dict.fromkeys(found) if name in self.profile.sizes]

    @cached_property
    def crossings(self) -> list[CrossingTensor]:
        """All tensors that travel, in the plan's order of the units that make them."""
        found, named = list[CrossingTensor](), self.traced.named
        for unit, names in enumerate(self.plan.units):
            home = self.plan.homes[unit]
            for name in names:
                users = (self.unit_of[user.name] for user in named[name].users if user.name in self.unit_of)
                takers = tuple(sorted({user for user in users if user != unit}))
                is_output = name in self.output_nodes
                size = self.profile.sizes[name]
                if not takers and not is_output:
                    continue
                assert size.shape is not None and size.dtype is not None
                ranks = {self.plan.homes[taker] for taker in takers} - {home}
                targets = sorted((set(range(self.num_ranks)) if is_output else ranks) - {home})
                needs = size.needs_grad and self.training
                found.append(
                    CrossingTensor(
                        len(found), name, unit, home, takers, tuple(targets), tuple(sorted(ranks)) if needs else (),
                        size.shape, size.dtype, needs, is_output,
                    )
                )  # fmt: skip
        return found

    @cached_property
    def inputs(self) -> list[list[CrossingTensor]]:
        """For each unit, the tensors that it takes from others."""
        found: list[list[CrossingTensor]] = [[] for _ in self.plan.units]
        for crossing in self.crossings:
            for taker in crossing.takers:
                found[taker].append(crossing)
        return found

    @cached_property
    def outputs(self) -> list[list[CrossingTensor]]:
        """For each unit, the tensors that it gives to others."""
        found: list[list[CrossingTensor]] = [[] for _ in self.plan.units]
        for crossing in self.crossings:
            found[crossing.unit].append(crossing)
        return found

    def arrivals(self, rank: int) -> list[CrossingTensor]:
        """The tensors that a rank receives in a forward, in the order in which it needs them.

        Outputs that it doesn't need last.
        """
        needed = [
            crossing
            for unit, home in enumerate(self.plan.homes)
            if home == rank
            for crossing in self.inputs[unit]
            if crossing.home != rank
        ]
        shown = [crossing for crossing in self.crossings if crossing.is_output and crossing.home != rank]
        return list({crossing.number: crossing for crossing in [*needed, *shown]}.values())

    def returns(self, rank: int) -> list[tuple[CrossingTensor, int]]:
        """The gradients that a rank receives in a backward, with their senders, in the order in which it needs them."""
        own = [unit for unit, home in enumerate(self.plan.homes) if home == rank]
        return [
            (crossing, sender)
            for unit in reversed(own)
            for crossing in self.outputs[unit]
            for sender in crossing.senders
        ]

    def gives_back(self, unit: int) -> list[CrossingTensor]:
        """The inputs of a unit whose gradients its rank can send after the unit's backward."""
        home = self.plan.homes[unit]
        return [
            crossing
            for crossing in self.inputs[unit]
            if home in crossing.senders
            and unit == min(taker for taker in crossing.takers if self.plan.homes[taker] == home)
        ]

    def sent_bytes(self, rank: int) -> int:
        """Payload bytes of a rank's messages in a step in which each output has a gradient."""
        given = sum(len(one.targets) * one.num_bytes for one in self.crossings if one.home == rank)
        return given + sum(one.gradient_bytes for one in self.crossings if rank in one.senders)

    def graph(self, network: Network) -> StepGraph:
        """The step as a graph. Its work is in seconds on a rank of speed 1, of the kinds "forward" and "backward"."""
        return _Drawn(self, network).graph()


class _Drawn:
    """A step's graph under construction."""

    def __init__(self, routes: DeviceRoutes, network: Network) -> None:
        self.routes, self.network = routes, network
        self.drawing = Drawing(routes.num_ranks)
        self.last: list[tuple[int, ...]] = [()] * routes.num_ranks

    def graph(self) -> StepGraph:
        routes, drawing = self.routes, self.drawing
        homes, arrived = routes.plan.homes, dict[tuple[int, int], tuple[int, ...]]()
        for unit, home in enumerate(homes):
            needed = (arrived.get((one.number, home), ()) for one in routes.inputs[unit])
            self._work(unit, FORWARD, 0, tuple(task for tasks in needed for task in tasks))
            for crossing in routes.outputs[unit]:
                for target in crossing.targets:
                    arrived[crossing.number, target] = self._message(home, target, crossing.num_bytes, FORWARD)
        shown = [one.number for one in routes.crossings if one.is_output]
        for rank in range(routes.num_ranks):
            self.last[rank] += tuple(task for one in shown for task in arrived.get((one, rank), ()))
        returned: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for unit in reversed(range(len(homes))) if routes.training else ():
            self._work(unit, BACKWARD, 1, tuple(t for one in routes.outputs[unit] for t in returned[one.number]))
            for crossing in routes.gives_back(unit):
                sent = self._message(homes[unit], crossing.home, crossing.gradient_bytes, BACKWARD)
                returned[crossing.number] += sent
        return drawing.done()

    def _work(self, unit: int, kind: str, part: int, after: tuple[int, ...]) -> None:
        home = self.routes.plan.homes[unit]
        seconds = sum(self.routes.profile.seconds[name][part] for name in self.routes.plan.units[unit])
        self.last[home] = self.drawing.task(home, Work(kind, seconds), (*self.last[home], *after))

    def _message(self, source: int, target: int, num_bytes: int, direction: str) -> tuple[int, ...]:
        level = "intra" if self.network.nodes[source] == self.network.nodes[target] else "inter"
        message = Message(target, num_bytes, f"placement_{direction}", level)
        return self.drawing.task(source, message, self.last[source])


def rates() -> Mapping[str, float]:
    """The rates of the kinds of work in a step's graph: seconds per second."""
    return {FORWARD: 1.0, BACKWARD: 1.0}
