"""A schedule under construction: operations with device and time, messages, and the memory in use."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.placement.graph import Devices, OpGraph


@dataclass(frozen=True)
class DeviceTransfer:
    """A value sent to another device. A device gets a value once, however many of its operations take it."""

    value: int
    source: int
    target: int
    begin_s: float
    arrive_s: float


@dataclass(frozen=True)
class DeviceSchedule:
    """The device and the time of each operation of a graph, and the messages between devices.

    homes: the device of each operation. spans: its start and end in seconds.
    """

    graph: OpGraph
    devices: Devices
    homes: tuple[int, ...]
    spans: tuple[tuple[float, float], ...]
    transfers: tuple[DeviceTransfer, ...]

    @property
    def makespan_s(self) -> float:
        """The time at which the last operation ends."""
        return max((end for _, end in self.spans), default=0.0)

    @property
    def order(self) -> list[int]:
        """All operations, sorted by their start: one order for all devices."""
        return sorted(range(len(self.spans)), key=lambda op: (*self.spans[op], op))

    def peak_bytes(self) -> list[float]:
        """The peak memory of each device; see Ledger."""
        ledger, most = Ledger(self.graph, self.devices.num), [0.0] * self.devices.num
        ends: list[tuple[float, int]] = []
        for op in self.order:
            start_s, end_s = self.spans[op]
            while ends and ends[0][0] <= start_s:
                ended = heapq.heappop(ends)[1]
                ledger.end(ended, self.homes[ended])
            ledger.start(op, self.homes[op])
            heapq.heappush(ends, (end_s, op))
            most[self.homes[op]] = max(most[self.homes[op]], ledger.used_bytes[self.homes[op]])
        return most


class Ledger:
    """The memory in use on each device, as operations start and end in order of time.

    An operation's temporary bytes and outputs count from its start, a copy from the start of the first operation that
    takes it, and a group's bytes from the start of its first operation. Temporary bytes are freed when the operation
    ends. A value and its copies are freed when all operations that take it have ended, unless the graph keeps values.
    """

    def __init__(self, graph: OpGraph, num_devices: int) -> None:
        self.graph = graph
        self.used_bytes = [0.0] * num_devices
        # The device of each group that has one.
        self.bound: dict[int, int] = {}
        self._copies: list[set[int]] = [set() for _ in graph.values]
        self._homes: dict[int, int] = {}
        self._left = [len(set(value.targets)) for value in graph.values]

    def missing(self, op: int, device: int) -> list[int]:
        """The inputs of an operation that a device does not have yet."""
        values, homes = self.graph.values, self._homes
        return [
            value
            for value in self.graph.inputs[op]
            if homes[values[value].source] != device and device not in self._copies[value]
        ]

    def missing_bytes(self, op: int, device: int) -> float:
        """Bytes of the inputs that a device does not have yet."""
        return sum(self.graph.values[value].num_bytes for value in self.missing(op, device))

    def need(self, op: int, device: int) -> float:
        """Bytes that a device needs in addition to start an operation."""
        graph, group = self.graph, self.graph.group_of[op]
        more = graph.ops[op].temporary + self.missing_bytes(op, device)
        more += 0.0 if group in self.bound else graph.reserved[group]
        # A group has reserved the outputs that are kept.
        return more + (0.0 if graph.keeps else sum(graph.values[value].held_bytes for value in graph.outputs[op]))

    def start(self, op: int, device: int) -> None:
        """Count the memory that an operation needs."""
        self.used_bytes[device] += self.need(op, device)
        for value in self.missing(op, device):
            self._copies[value].add(device)
        self.bound.setdefault(self.graph.group_of[op], device)
        self._homes[op] = device

    def end(self, op: int, device: int) -> None:
        """Free the memory that is no longer needed after an operation."""
        self.used_bytes[device] -= self.graph.ops[op].temporary
        for number in self.graph.inputs[op]:
            self._left[number] -= 1
            if self._left[number] or self.graph.keeps:
                continue
            value = self.graph.values[number]
            self.used_bytes[self._homes[value.source]] -= value.held_bytes
            for other in self._copies[number]:
                self.used_bytes[other] -= value.num_bytes


class NoRoomError(ConfigError):
    """An operation fits on no device; the message names it."""


class DeviceBoard:
    """Devices on which operations are placed one after the other, each after the ends of its inputs are known."""

    def __init__(self, graph: OpGraph, devices: Devices) -> None:
        self.graph, self.devices = graph, devices
        self.homes: list[int | None] = [None] * len(graph.ops)
        self.spans = [(0.0, 0.0)] * len(graph.ops)
        self.transfers: list[DeviceTransfer] = []
        self.free_s = [0.0] * devices.num
        self.ledger = Ledger(graph, devices.num)
        self._link_free_s: dict[tuple[int, int], float] = defaultdict(float)
        # When a value is on a device that did not make it.
        self._arrivals: dict[tuple[int, int], float] = {}
        # What was computed of messages to a device holds until another one is sent there.
        self._num_sent = [0] * devices.num
        self._known: dict[tuple[int, int], tuple[int, float]] = {}

    def seconds(self, op: int, device: int) -> float:
        """Seconds that an operation takes on a device."""
        return self.graph.ops[op].seconds / self.devices.speed(device)

    def ready_s(self, op: int, device: int) -> float:
        """The time at which all inputs of an operation would be on a device. Their ends must be known."""
        known = self._known.get((op, device))
        if known is None or known[0] != self._num_sent[device]:
            ready_s = max((arrive_s for _, _, arrive_s in self._messages(op, device)), default=0.0)
            for value in self.graph.inputs[op]:
                source = self.graph.values[value].source
                here = self.spans[source][1] if self.homes[source] == device else self._arrivals.get((value, device))
                ready_s = max(ready_s, here or 0.0)
            known = self._known[op, device] = (self._num_sent[device], ready_s)
        return known[1]

    def fits(self, op: int, device: int) -> bool:
        """Whether the operation's group may be on the device, and the device has memory for the operation now."""
        home = self.ledger.bound.get(self.graph.group_of[op], device)
        room = self.devices.memory_bytes - self.ledger.used_bytes[device]
        return home == device and self.ledger.need(op, device) <= room

    def place(self, op: int, device: int, not_before_s: float = 0.0) -> None:
        """Run an operation on a device as early as possible, and send its inputs there."""
        start_s = max(self.ready_s(op, device), self.free_s[device], not_before_s)
        for value, begin_s, arrive_s in self._messages(op, device):
            source = self.homes[self.graph.values[value].source]
            assert source is not None
            self.transfers.append(DeviceTransfer(value, source, device, begin_s, arrive_s))
            self._arrivals[value, device] = arrive_s
            link_s = self.devices.link_s(self.graph.values[value].num_bytes, source, device)
            self._link_free_s[source, device] = begin_s + link_s
            self._num_sent[device] += 1
        self.ledger.start(op, device)
        self.homes[op] = device
        self.free_s[device] = start_s + self.seconds(op, device)
        self.spans[op] = (start_s, self.free_s[device])

    def end(self, op: int) -> None:
        """Free an operation's memory after it has run."""
        home = self.homes[op]
        assert home is not None
        self.ledger.end(op, home)

    def done(self) -> DeviceSchedule:
        """The schedule, after all operations are placed."""
        homes = tuple(home for home in self.homes if home is not None)
        assert len(homes) == len(self.graph.ops)
        return DeviceSchedule(self.graph, self.devices, homes, tuple(self.spans), tuple(self.transfers))

    def _messages(self, op: int, device: int) -> list[tuple[int, float, float]]:
        """The values to be sent to a device for an operation: (value, begin, arrival)."""
        graph, found = self.graph, []
        missing = [(self.spans[graph.values[value].source][1], value) for value in self.ledger.missing(op, device)]
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


def replay(
    graph: OpGraph, devices: Devices, homes: Sequence[int], order: Sequence[int] | None = None
) -> DeviceSchedule:
    """The schedule with given devices. Each operation runs as early as the order on its device allows.

    order: a topological order of all operations; None: the graph's. Memory is not checked.
    """
    board = DeviceBoard(graph, devices)
    for op in range(len(graph.ops)) if order is None else order:
        board.place(op, homes[op])
    return board.done()
