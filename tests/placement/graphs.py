"""Graphs to place, and schedules checked and searched without the schedulers' own arithmetic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from thinwire.cost import Network
from thinwire.placement.board import DeviceSchedule, replay
from thinwire.placement.graph import Devices, Op, OpGraph


def devices(num: int, message_s: float = 0.0, memory_bytes: float = float("inf"), *, queues: bool = True) -> Devices:
    """Messages of one byte take so long."""
    rate = 1 / message_s if message_s else float("inf")
    return Devices(Network.even(num, rate), memory_bytes, queues=queues)


def layered(seed: int, num_layers: int, width: int, *, keeps: bool = True, num_groups: int = 0) -> OpGraph:
    """Layers of random operations, each with inputs from the layer before."""
    rng = random.Random(seed)
    ops: list[Op] = []
    edges, before = list[tuple[int, int]](), list[int]()
    for _ in range(num_layers):
        layer = []
        for _ in range(rng.randint(1, width)):
            number = len(ops)
            ops.append(Op(f"op{number}", rng.randint(2, 8) / 4, rng.randint(1, 9), rng.randint(0, 5)))
            edges += [(each, number) for each in rng.sample(before, min(len(before), rng.randint(1, 3)))]
            layer.append(number)
        before = layer
    members = rng.sample(range(len(ops)), 3 * num_groups)
    groups = [members[3 * each : 3 * each + 3] for each in range(num_groups)]
    return OpGraph.of(ops, edges, {n: rng.randint(1, 4) for n in range(len(ops))}, groups, keeps=keeps)


def out_tree(seed: int, num: int) -> OpGraph:
    """Every operation has one parent, and takes a second or more."""
    rng = random.Random(seed)
    edges = [(rng.randrange(max(0, number - 4), number), number) for number in range(1, num)]
    return OpGraph.of([Op(f"op{number}", rng.randint(4, 8) / 4) for number in range(num)], edges, 1.0)


def check(schedule: DeviceSchedule) -> None:
    """Assert that a schedule can run: order, one at a time, messages in time and once, groups, memory."""
    graph, own = schedule.graph, schedule.devices
    assert len(schedule.homes) == len(schedule.spans) == len(graph.ops)
    for op, (start, end) in enumerate(schedule.spans):
        assert end - start == graph.ops[op].seconds / own.speed(schedule.homes[op])
    for device in range(own.num):
        spans = sorted(span for span, home in zip(schedule.spans, schedule.homes, strict=True) if home == device)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    arrivals = {(each.value, each.target): each.arrive_s for each in schedule.transfers}
    assert len(arrivals) == len(schedule.transfers), "a value is sent to a device once"
    for number, value in enumerate(graph.values):
        for target in value.targets:
            home, other = schedule.homes[value.source], schedule.homes[target]
            there = schedule.spans[value.source][1] if home == other else arrivals[number, other]
            assert there <= schedule.spans[target][0]
    for each in schedule.transfers:
        assert each.begin_s >= schedule.spans[graph.values[each.value].source][1]
        assert any(schedule.homes[target] == each.target for target in graph.values[each.value].targets)
    for pair in itertools.permutations(range(own.num), 2) if own.queues else ():
        busy = sorted(
            (each.begin_s, each.begin_s + own.link_s(graph.values[each.value].num_bytes, *pair))
            for each in schedule.transfers
            if (each.source, each.target) == pair
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(busy))
    assert all(len({schedule.homes[op] for op in group}) == 1 for group in graph.groups)
    assert all(peak <= own.memory_bytes for peak in peaks(schedule))


def peaks(schedule: DeviceSchedule) -> list[float]:
    """The most that each device holds at the start of any operation, added up anew for each of them."""
    graph, homes, most = schedule.graph, schedule.homes, [0.0] * schedule.devices.num
    grouped = {op for group in graph.groups for op in group}
    groups = [*map(sorted, graph.groups), *([op] for op in range(len(graph.ops)) if op not in grouped)]
    kept = [sum(value.held_bytes for value in graph.values if value.source == op) for op in range(len(graph.ops))]
    need = [sum(graph.ops[op].permanent + kept[op] * graph.keeps for op in members) for members in groups]
    for now in sorted({start for start, _ in schedule.spans}):
        held = [0.0] * schedule.devices.num
        begun = [start <= now for start, _ in schedule.spans]
        ended = [end <= now for _, end in schedule.spans]
        for members, num_bytes in zip(groups, need, strict=True):
            held[homes[members[0]]] += num_bytes if any(begun[op] for op in members) else 0.0
        for op, home in enumerate(homes):
            held[home] += graph.ops[op].temporary if begun[op] and not ended[op] else 0.0
        for value in graph.values:
            if not graph.keeps and all(ended[target] for target in value.targets):
                continue
            home = homes[value.source]
            held[home] += value.held_bytes if begun[value.source] and not graph.keeps else 0.0
            for device in {homes[target] for target in value.targets if begun[target]} - {home}:
                held[device] += value.num_bytes
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return most


def best_s(graph: OpGraph, own: Devices) -> float:
    """The shortest schedule of all, by trying all devices in all topological orders; memory is not limited."""
    num, least = len(graph.ops), float("inf")
    for order in _orders(graph):
        # All devices are alike: the first operation may stay where it is.
        for homes in itertools.product(range(own.num), repeat=num - 1):
            least = min(least, replay(graph, own, (0, *homes), order).makespan_s)
    return least


def _orders(graph: OpGraph) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(graph.ops))):
        place = {op: at for at, op in enumerate(order)}
        if all(place[i] < place[j] for i, j in graph.edges):
            yield order


def lower_bound_s(graph: OpGraph, devices: Devices) -> float:
    """A lower bound of all schedules: the longest path without messages, and each device's minimum work."""
    fastest = max(map(devices.speed, range(devices.num)))
    ends = [0.0] * len(graph.ops)
    for number, op in enumerate(graph.ops):
        start = max((ends[graph.values[value].source] for value in graph.inputs[number]), default=0.0)
        ends[number] = start + op.seconds / fastest
    total = sum(op.seconds for op in graph.ops)
    return max([*ends, total / sum(map(devices.speed, range(devices.num)))], default=0.0)
