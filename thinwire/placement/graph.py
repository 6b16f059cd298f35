"""Operations, the values between them, and the devices on which they are placed."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from thinwire.cost import Network
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Op:
    """One operation.

    seconds: on a device of speed 1. permanent: bytes held from its placement to the end of the step, such as weights,
    their gradients and optimizer states. temporary: bytes held while it runs, besides its outputs.
    """

    name: str
    seconds: float
    permanent: float = 0.0
    temporary: float = 0.0


@dataclass(frozen=True)
class Value:
    """An output of an operation.

    num_bytes: size of a message with it, and of its copy on another device. home_bytes: memory on the device where it
    is made; None: num_bytes; less for a view.
    """

    source: int
    targets: tuple[int, ...]
    num_bytes: float
    home_bytes: float | None = None

    @property
    def held_bytes(self) -> float:
        return self.num_bytes if self.home_bytes is None else self.home_bytes


@dataclass(frozen=True)
class OpGraph:
    """Operations in a topological order, and the values between them.

    groups: sets of operations that must share a device; an operation is in at most one. keeps: outputs and copies stay
    until the step ends, because a backward follows; if false, a value is freed when all operations that take it have
    run. Raises ConfigError for a value that goes to an earlier operation, and for an operation in two groups.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    groups: tuple[frozenset[int], ...] = ()
    keeps: bool = True

    def __post_init__(self) -> None:
        for value in self.values:
            if any(target <= value.source for target in value.targets):
                name = self.ops[value.source].name
                raise ConfigError(
                    f"a value of {name!r} goes to an operation before it: state them in topological order"
                )
        members = [op for group in self.groups for op in group]
        if len(members) > len(set(members)):
            twice = next(op for op in members if members.count(op) > 1)
            raise ConfigError(f"{self.ops[twice].name!r} is in two groups: an operation has one; join the groups")

    @classmethod
    def of(
        cls, ops: Iterable[Op], edges: Iterable[tuple[int, int]], num_bytes: float | Mapping[int, float] = 0.0,
        groups: Iterable[Iterable[int]] = (), *, keeps: bool = True,
    ) -> OpGraph:  # fmt: skip
        """A graph of operations with one output each. num_bytes: of every output, or by operation."""
        targets: dict[int, list[int]] = defaultdict(list)
        for source, target in edges:
            targets[source].append(target)
        sizes = num_bytes if isinstance(num_bytes, Mapping) else dict.fromkeys(targets, num_bytes)
        values = tuple(Value(source, tuple(sorted(found)), sizes[source]) for source, found in sorted(targets.items()))
        return cls(tuple(ops), values, tuple(frozenset(group) for group in groups), keeps)

    @cached_property
    def inputs(self) -> list[list[int]]:
        """For each operation, the values that it takes."""
        found: list[list[int]] = [[] for _ in self.ops]
        for number, value in enumerate(self.values):
            for target in dict.fromkeys(value.targets):
                found[target].append(number)
        return found

    @cached_property
    def outputs(self) -> list[list[int]]:
        """For each operation, the values that it makes."""
        found: list[list[int]] = [[] for _ in self.ops]
        for number, value in enumerate(self.values):
            found[value.source].append(number)
        return found

    @cached_property
    def edges(self) -> dict[tuple[int, int], list[int]]:
        """The values between each two operations."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, value in enumerate(self.values):
            for target in dict.fromkeys(value.targets):
                found[value.source, target].append(number)
        return dict(found)

    @cached_property
    def group_of(self) -> list[int]:
        """For each operation, the number of its group. An operation outside all groups has one of its own."""
        found = [-1] * len(self.ops)
        for number, group in enumerate(self.groups):
            for op in group:
                found[op] = number
        alone = iter(range(len(self.groups), len(self.groups) + len(self.ops)))
        return [next(alone) if number < 0 else number for number in found]

    @cached_property
    def reserved(self) -> dict[int, float]:
        """Bytes that each group needs on its device until the end.

        All of them are reserved with its first operation.
        """
        found: dict[int, float] = defaultdict(float)
        for op, number in enumerate(self.group_of):
            outputs = sum(self.values[value].held_bytes for value in self.outputs[op]) if self.keeps else 0.0
            found[number] += self.ops[op].permanent + outputs
        return dict(found)

    @property
    def total_bytes(self) -> float:
        """Bytes that all groups reserve."""
        return sum(self.reserved.values())

    def seconds_between(self, source: int, target: int, devices: Devices) -> float:
        """c of an edge: seconds that its values travel, the mean over all pairs of devices; 0 inside a group."""
        if self.group_of[source] == self.group_of[target]:
            return 0.0
        num_bytes = sum(self.values[value].num_bytes for value in self.edges[source, target])
        return devices.mean_s(num_bytes)


@dataclass(frozen=True)
class Devices:
    """The devices for operations.

    Attributes:
        network: between the devices.
        memory_bytes: of each device.
        speeds: of each device; empty: all 1.
        queues: messages between two devices follow each other; if false, all travel at once, each at the full rate.
    """

    network: Network
    memory_bytes: float = float("inf")
    speeds: tuple[float, ...] = ()
    queues: bool = True
    _means: dict[float, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num(self) -> int:
        return len(self.network.nodes)

    def speed(self, device: int) -> float:
        return self.speeds[device] if self.speeds else 1.0

    def link_s(self, num_bytes: float, source: int, target: int) -> float:
        """Seconds for which a message occupies its link."""
        return num_bytes / self.network.rates[source][target] if num_bytes else 0.0

    def delay_s(self, source: int, target: int) -> float:
        """Seconds for which a byte travels."""
        return self.network.delays_s[source][target]

    def mean_s(self, num_bytes: float) -> float:
        """Seconds for a message, the mean over all pairs."""
        if num_bytes not in self._means:
            pairs = self.network.pairs
            total = sum(self.link_s(num_bytes, *pair) + self.delay_s(*pair) for pair in pairs)
            self._means[num_bytes] = total / len(pairs) if pairs else 0.0
        return self._means[num_bytes]

    @property
    def mean_speed(self) -> float:
        return sum(map(self.speed, range(self.num))) / self.num


def in_topological_order(num: int, edges: Iterable[tuple[int, int]], ranks: Sequence[int]) -> list[int]:
    """Numbers 0 to num - 1 in an order in which every edge leads forward; small ranks first."""
    followers: dict[int, set[int]] = defaultdict(set)
    waits = [0] * num
    for source, target in edges:
        if target not in followers[source]:
            followers[source].add(target)
            waits[target] += 1
    ready = [(ranks[number], number) for number in range(num) if not waits[number]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(number)
        for target in followers[number]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, (ranks[target], target))
    return found
