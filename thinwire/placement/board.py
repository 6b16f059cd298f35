"""A schedule in the making: what runs where and when, what travels, what memory holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.placement.graph import Devices, OpGraph


@dataclass(frozen=True)
class Transfer:
    """A value on its way to another device. A device gets a value once, however many operations take it there."""

    value: int
    source: int
    target: int
    begin_s: float
    arrive_s: float


@dataclass(frozen=True)
class Schedule:
    """Where and when each operation of a graph runs, and what travels for it.

    homes: the device of each operation; spans: its start and end in seconds.
    """

    graph: OpGraph
    devices: Devices
    homes: tuple[int, ...]
    spans: tuple[tuple[float, float], ...]
    transfers: tuple[Transfer, ...]

    @property
    def makespan_s(self) -> float:
        """When the last operation ends."""
        return max((end for _, end in self.spans), default=0.0)

    @property
    def order(self) -> list[int]:
        """All operations by their start: the one order of all devices."""
        return sorted(range(len(self.spans)), key=lambda op: (*self.spans[op], op))

    def peak_bytes(self) -> list[float]:
        """The most memory that each device holds at any time.

        An operation's temporary bytes and outputs count from its start, a copy from the start of the first operation
        that takes it. Temporary bytes are freed at the operation's end, a value when all of its targets have run,
        unless the graph keeps values. A group's permanent bytes count from the start of its first operation.
        """
        graph, never = self.graph, float("inf")
        changes: list[list[tuple[float, int, float]]] = [[] for _ in range(self.devices.num)]

        def hold(device: int, num_bytes: float, begin_s: float, end_s: float) -> None:
            # What ends is freed before what begins at the same time; what takes no time is held for all that.
            changes[device].append((begin_s, 1, num_bytes))
            changes[device].append((end_s, 0 if end_s > begin_s else 2, -num_bytes))

        begun: set[int] = set()
        for op in self.order:
            start_s, end_s = self.spans[op]
            device, group = self.homes[op], graph.group_of[op]
            hold(device, graph.ops[op].temporary, start_s, end_s)
            if group not in begun:
                begun.add(group)
                hold(device, graph.reserved[group], start_s, never)
        for number, value in enumerate(graph.values):
            home, ends = self.homes[value.source], [self.spans[target][1] for target in value.targets]
            last_s = never if graph.keeps or not ends else max(ends)
            if not graph.keeps:
                hold(home, value.held_bytes, self.spans[value.source][0], last_s)
            for transfer in (each for each in self.transfers if each.value == number):
                takers = [target for target in value.targets if self.homes[target] == transfer.target]
                hold(transfer.target, value.num_bytes, min(self.spans[taker][0] for taker in takers), last_s)
        return [_peak(each) for each in changes]


def _peak(changes: list[tuple[float, int, float]]) -> float:
    held = peak = 0.0
    for _, _, more in sorted(changes):
        held += more
        peak = max(peak, held)
    return peak


class NoRoomError(ConfigError):
    """An operation fits on no device; the message names it."""


class Board:
    """Devices on which operations are placed one after the other, each once its inputs' ends are known."""

    def __init__(self, graph: OpGraph, devices: Devices) -> None:
        self.graph, self.devices = graph, devices
        self.homes: list[int | None] = [None] * len(graph.ops)
        self.spans = [(0.0, 0.0)] * len(graph.ops)
        self.transfers: list[Transfer] = []
        self.free_s = [0.0] * devices.num
        self.used_bytes = [0.0] * devices.num
        # The device of each group that has one.
        self.bound: dict[int, int] = {}
        self._link_free_s: dict[tuple[int, int], float] = defaultdict(float)
        # When a value is on a device that did not make it.
        self._arrivals: dict[tuple[int, int], float] = {}
        # What was computed of messages to a device holds until another one is sent there.
        self._num_sent = [0] * devices.num
        self._known: dict[tuple[int, int], tuple[int, float]] = {}
        self._left = [len(set(value.targets)) for value in graph.values]

    def seconds(self, op: int, device: int) -> float:
        """How long an operation takes on a device."""
        return self.graph.ops[op].seconds / self.devices.speed(device)

    def ready_s(self, op: int, device: int) -> float:
        """When all inputs of an operation would be on a device; the ends of what makes them must be known."""
        known = self._known.get((op, device))
        if known is None or known[0] != self._num_sent[device]:
            ready_s = max((arrive_s for _, _, arrive_s in self._messages(op, device)), default=0.0)
            for value in self.graph.inputs[op]:
                source = self.graph.values[value].source
                here = self.spans[source][1] if self.homes[source] == device else self._arrivals.get((value, device))
                ready_s = max(ready_s, here or 0.0)
            known = self._known[op, device] = (self._num_sent[device], ready_s)
        return known[1]

    def missing_bytes(self, op: int, device: int) -> float:
        """Bytes of the inputs that a device does not have."""
        values = self.graph.values
        return sum(
            values[value].num_bytes
            for value in self.graph.inputs[op]
            if self.homes[values[value].source] != device and (value, device) not in self._arrivals
        )

    def fits(self, op: int, device: int) -> bool:
        """Whether the operation's group may be there, and memory holds now what the operation needs."""
        graph, group = self.graph, self.graph.group_of[op]
        home = self.bound.get(group)
        if home is not None and home != device:
            return False
        more = graph.ops[op].temporary + self.missing_bytes(op, device) + self._new_outputs(op)
        more += graph.reserved[group] if home is None else 0.0
        return self.used_bytes[device] + more <= self.devices.memory_bytes

    def place(self, op: int, device: int, not_before_s: float = 0.0) -> None:
        """Run an operation on a device as early as it can be, and send what it needs there."""
        graph, group = self.graph, self.graph.group_of[op]
        start_s = max(self.ready_s(op, device), self.free_s[device], not_before_s)
        if group not in self.bound:
            self.bound[group] = device
            self.used_bytes[device] += graph.reserved[group]
        self.used_bytes[device] += graph.ops[op].temporary + self.missing_bytes(op, device) + self._new_outputs(op)
        for value, begin_s, arrive_s in self._messages(op, device):
            source = self.homes[graph.values[value].source]
            assert source is not None
            self.transfers.append(Transfer(value, source, device, begin_s, arrive_s))
            self._arrivals[value, device] = arrive_s
            self._link_free_s[source, device] = begin_s + self.devices.link_s(
                graph.values[value].num_bytes, source, device
            )
            self._num_sent[device] += 1
        self.homes[op] = device
        self.free_s[device] = start_s + self.seconds(op, device)
        self.spans[op] = (start_s, self.free_s[device])

    def end(self, op: int) -> list[int]:
        """Free what an operation held, now that it has run; its targets."""
        graph, home = self.graph, self.homes[op]
        assert home is not None
        self.used_bytes[home] -= graph.ops[op].temporary
        for number in graph.inputs[op]:
            self._left[number] -= 1
            if not self._left[number] and not graph.keeps:
                value = graph.values[number]
                source = self.homes[value.source]
                assert source is not None
                self.used_bytes[source] -= value.held_bytes
                for device in range(self.devices.num):
                    if (number, device) in self._arrivals:
                        self.used_bytes[device] -= value.num_bytes
        return sorted({target for number in graph.outputs[op] for target in graph.values[number].targets})

    def done(self) -> Schedule:
        """The schedule, when all operations are placed."""
        homes = tuple(home for home in self.homes if home is not None)
        assert len(homes) == len(self.graph.ops)
        return Schedule(self.graph, self.devices, homes, tuple(self.spans), tuple(self.transfers))

    def _new_outputs(self, op: int) -> float:
        """Bytes of an operation's outputs, unless its group has reserved them."""
        if self.graph.keeps:
            return 0.0
        return sum(self.graph.values[value].held_bytes for value in self.graph.outputs[op])

    def _messages(self, op: int, device: int) -> list[tuple[int, float, float]]:
        """The values that a device would be sent for an operation: (value, begin, arrival)."""
        graph, found = self.graph, []
        missing = []
        for value in graph.inputs[op]:
            source = graph.values[value].source
            if self.homes[source] != device and (value, device) not in self._arrivals:
                missing.append((self.spans[source][1], value))
        free_s: dict[int, float] = {}
        for end_s, value in sorted(missing):
            source = self.homes[graph.values[value].source]
            assert source is not None
            begin_s = end_s
            if self.devices.queues:
                begin_s = max(end_s, free_s.get(source, self._link_free_s[source, device]))
            left_s = begin_s + self.devices.link_s(graph.values[value].num_bytes, source, device)
            free_s[source] = left_s
            found.append((value, begin_s, left_s + self.devices.delay_s(source, device)))
        return found


def replay(graph: OpGraph, devices: Devices, homes: Sequence[int], order: Sequence[int] | None = None) -> Schedule:
    """The schedule of operations with given devices, each as early as the order of its device allows.

    order: a topological one of all operations; None: that of the graph. Memory is not checked.
    """
    board = Board(graph, devices)
    for op in range(len(graph.ops)) if order is None else order:
        board.place(op, homes[op])
    return board.done()
