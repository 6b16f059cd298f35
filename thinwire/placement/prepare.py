"""Joins neighbouring operations that should stay together, before a graph is placed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from thinwire.placement.board import DeviceSchedule, NoRoomError
from thinwire.placement.graph import Devices, Op, OpGraph, in_topological_order

Scheduler = Callable[[OpGraph, Devices], DeviceSchedule]


class Sets:
    """Disjoint sets of numbers; the smallest member identifies a set."""

    def __init__(self, num: int) -> None:
        self._parent = list(range(num))

    def find(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.find(a), self.find(b)))
        self._parent[b] = a

    def members(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self._parent)):
            found[self.find(number)].append(number)
        return dict(found)


@dataclass(frozen=True)
class FusedGraph:
    """A graph of units. units: for each, the operations of the original graph that it runs, in order."""

    graph: OpGraph
    units: tuple[tuple[int, ...], ...]


def co_adjacent(graph: OpGraph, devices: Devices) -> OpGraph:
    """The graph with larger groups: an operation joins its only consumer if the message would take longer than it.

    A group never exceeds a device's memory. Source: "Baechi" (SoCC 2020), section 4.
    """
    sets, room = Sets(len(graph.ops)), dict(graph.reserved)
    need = {min(op for op, own in enumerate(graph.group_of) if own == number): room[number] for number in room}
    first: dict[int, int] = {}
    for op, number in enumerate(graph.group_of):
        sets.join(first.setdefault(number, op), op)
    temporary = max((op.temporary for op in graph.ops), default=0.0)
    for op in range(len(graph.ops)):
        targets = {target for value in graph.outputs[op] for target in graph.values[value].targets}
        if len(targets) != 1:
            continue
        (target,) = targets
        a, b = sets.find(op), sets.find(target)
        num_bytes = sum(graph.values[value].num_bytes for value in graph.edges[op, target])
        if a == b or devices.mean_s(num_bytes) <= graph.ops[op].seconds / devices.mean_speed:
            continue
        if need[a] + need[b] + temporary <= devices.memory_bytes:
            sets.join(a, b)
            need[min(a, b)] = need[a] + need[b]
    groups = tuple(frozenset(members) for members in sets.members().values() if len(members) > 1)
    return replace(graph, groups=groups)


def fused(graph: OpGraph, pairs: Iterable[tuple[int, int]]) -> FusedGraph:
    """The graph in which these pairs of neighbours are fused, as far as that makes no cycle.

    A pair can be fused if no other path leads from the first to the second. A unit takes the sum of its operations'
    seconds, and makes the values that other units take. Values inside it count as permanent if the graph keeps values,
    else as temporary.
    """
    sets = Sets(len(graph.ops))
    after: dict[int, set[int]] = defaultdict(set)
    before: dict[int, set[int]] = defaultdict(set)
    for i, j in graph.edges:
        after[i].add(j)
        before[j].add(i)
    for pair in sorted(pairs):
        a, b = map(sets.find, pair)
        if a == b or _leads_around(after, before, a, b):
            continue
        sets.join(a, b)
        kept, gone = sorted((a, b))
        for near, far in ((after, before), (before, after)):
            near[kept] = (near[kept] | near.pop(gone, set())) - {kept, gone}
            for other in near[kept]:
                far[other] = (far[other] - {gone}) | {kept}
    return _contracted(graph, sets)


def _leads_around(after: dict[int, set[int]], before: dict[int, set[int]], a: int, b: int) -> bool:
    """Whether a path leads from a to b, or back, through other operations."""
    for source, target in ((a, b), (b, a)):
        if after[source] <= {target} or before[target] <= {source}:
            continue
        seen, left = set[int](), [each for each in after[source] if each != target]
        while left:
            each = left.pop()
            if each == target:
                return True
            if each not in seen:
                seen.add(each)
                left += after[each]
    return False


def _contracted(graph: OpGraph, sets: Sets) -> FusedGraph:
    members = sets.members()
    firsts = sorted(members)
    number_of = {op: number for number, first in enumerate(firsts) for op in members[first]}
    crossing = {(number_of[i], number_of[j]) for i, j in graph.edges if number_of[i] != number_of[j]}
    order = in_topological_order(len(firsts), crossing, firsts)
    assert len(order) == len(firsts)
    units = tuple(tuple(members[firsts[number]]) for number in order)
    unit_of = {op: unit for unit, ops in enumerate(units) for op in ops}
    values, inside = [], defaultdict[int, float](float)
    for value in graph.values:
        unit = unit_of[value.source]
        targets = tuple(sorted({unit_of[target] for target in value.targets} - {unit}))
        if targets or not value.targets:
            values.append(replace(value, source=unit, targets=targets))
        else:
            inside[unit] += value.held_bytes
    ops = tuple(_joined(graph, ops, inside[unit]) for unit, ops in enumerate(units))
    joined = Sets(len(units))
    for group in graph.groups:
        own = [unit_of[op] for op in group]
        for unit in own:
            joined.join(own[0], unit)
    groups = tuple(frozenset(each) for each in joined.members().values() if len(each) > 1)
    return FusedGraph(OpGraph(ops, tuple(values), groups, graph.keeps), units)


def _joined(graph: OpGraph, ops: tuple[int, ...], inside_bytes: float) -> Op:
    own = [graph.ops[op] for op in ops]
    permanent, temporary = sum(op.permanent for op in own), max(op.temporary for op in own)
    name = own[0].name if len(own) == 1 else f"{own[0].name}..{own[-1].name}"
    if graph.keeps:
        return Op(name, sum(op.seconds for op in own), permanent + inside_bytes, temporary)
    return Op(name, sum(op.seconds for op in own), permanent, temporary + inside_bytes)


def scheduled(graph: OpGraph, devices: Devices, scheduler: Scheduler) -> tuple[FusedGraph, DeviceSchedule]:
    """The shorter of two schedules: of the graph with co-adjacent operations fused, and of the graph itself.

    Fusing saves messages, but may put on one device what could run on two. Raises NoRoomError if neither fits.
    """
    wider = co_adjacent(graph, devices)
    together = [(i, j) for i, j in wider.edges if wider.group_of[i] == wider.group_of[j]]
    # Members of a stated group that touch are one operation in both.
    apart = [(i, j) for i, j in graph.edges if graph.group_of[i] == graph.group_of[j]]
    found: list[tuple[FusedGraph, DeviceSchedule]] = []
    reason: NoRoomError | None = None
    for base, pairs in ((wider, together), (graph, apart)):
        way = fused(base, pairs)
        try:
            found.append((way, scheduler(way.graph, devices)))
        except NoRoomError as error:
            reason = error
        if together == apart and wider.groups == graph.groups:
            break
    if not found:
        assert reason is not None
        raise reason
    return min(found, key=lambda pair: pair[1].makespan_s)


def least_memory(graph: OpGraph, devices: Devices, scheduler: Scheduler) -> float:
    """The memory per device that a scheduler needs to place a graph, found by bisection to within 2%."""
    # What one device needs to hold all, and what is known not to do.
    high = graph.total_bytes + sum(value.num_bytes for value in graph.values)
    high += max((op.temporary for op in graph.ops), default=0.0)
    low = max(graph.total_bytes / devices.num, *graph.reserved.values(), devices.memory_bytes)

    def fits(memory_bytes: float) -> bool:
        try:
            scheduled(graph, replace(devices, memory_bytes=memory_bytes), scheduler)
        except NoRoomError:
            return False
        return True

    while high > 1.02 * low and low > 0:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
