"""m-ETF: of all ready operations, the one that can start earliest starts, if memory allows."""

from __future__ import annotations

import heapq
import math

from thinwire.placement.board import DeviceBoard, DeviceSchedule, NoRoomError
from thinwire.placement.graph import Devices, OpGraph


class EarliestFirst:
    """One run of m-ETF, forward in time.

    At each moment, the operations whose inputs exist are `ready`. Those that can start now on some device, with memory
    for everything they need, start in the graph's order. Then time advances to the next event: an operation ends, or an
    input arrives on a device where its operation can start. Starts never go back in time, so the memory counted is that
    of the moment.
    """

    def __init__(self, graph: OpGraph, devices: Devices) -> None:
        self.graph, self.devices = graph, devices
        self.board = DeviceBoard(graph, devices)
        self.now_s = 0.0
        self.ready = [op for op, inputs in enumerate(graph.inputs) if not inputs]
        self._waits = [len({graph.values[value].source for value in inputs}) for inputs in graph.inputs]
        self._ends: list[tuple[float, int]] = []

    def run(self) -> DeviceSchedule:
        """Place all operations. Raises NoRoomError."""
        num_started = 0
        while num_started < len(self.graph.ops):
            while self._ends and self._ends[0][0] <= self.now_s:
                self._end(heapq.heappop(self._ends)[1])
            if self._start_one():
                num_started += 1
            else:
                self._go_on()
        return self.board.done()

    def begin_moment(self) -> None:
        """Called at each moment, before operations are chosen."""

    def may_s(self, op: int, device: int) -> float:
        """The time from which an operation is allowed on a device."""
        return self.now_s

    def start_s(self, op: int, device: int) -> float:
        """The time at which an operation could start on a device. The ends of all its inputs must be known."""
        return max(self.now_s, self.board.ready_s(op, device), self.board.free_s[device])

    def _start_one(self) -> bool:
        """Start the first operation that can start now, and return whether there was one.

        If not, note the next possible time.
        """
        self.begin_moment()
        self._next_s = math.inf
        for op in self.ready:
            found: list[tuple[float, int]] = []
            for device in range(self.devices.num):
                at_s = max(self.start_s(op, device), self.may_s(op, device))
                if at_s > self.now_s:
                    self._next_s = min(self._next_s, at_s)
                elif self.board.fits(op, device):
                    found.append((self.board.ledger.missing_bytes(op, device), device))
            if found:
                device = min(found)[1]
                self.board.place(op, device, self.now_s)
                self.ready.remove(op)
                heapq.heappush(self._ends, (self.board.spans[op][1], op))
                return True
        return False

    def _go_on(self) -> None:
        """Advance to the next moment at which something can change."""
        next_s = min(self._next_s, self._ends[0][0] if self._ends else math.inf)
        if next_s == math.inf:
            names = [self.graph.ops[op].name for op in self.ready]
            raise NoRoomError(f"{names[0]!r} fits on no device beside what is there")
        self.now_s = next_s

    def _end(self, op: int) -> None:
        self.board.end(op)
        for target in {target for value in self.graph.outputs[op] for target in self.graph.values[value].targets}:
            self._waits[target] -= 1
            if not self._waits[target]:
                self.ready.append(target)
        self.ready.sort()


def m_etf(graph: OpGraph, devices: Devices) -> DeviceSchedule:
    """Earliest task first, with memory.

    Of all pairs of a ready operation o and a device d with enough memory, the one with the smallest
    sched(o, d) = max(ready(o, d), free(d)) comes next; ready(o, d) is the time at which the last input of o is on d.
    Ties go to the first operation in the graph, then to the device that has most of its inputs. Without memory limits
    and messages, a schedule takes at most 2 - 1/n times the optimum. Raises NoRoomError.
    Source: "Baechi" (SoCC 2020), section 3.2; Hwang et al., "Scheduling precedence graphs in systems with
    interprocessor communication times" (1989).
    """
    return EarliestFirst(graph, devices).run()
