"""m-TOPO: operations in their order fill one device after the other."""

from __future__ import annotations

from thinwire.placement.board import NoRoomError, Schedule, replay
from thinwire.placement.graph import Devices, OpGraph


def m_topo(graph: OpGraph, devices: Devices) -> Schedule:
    """Fill device after device with operations in topological order, each up to the same share.

    The share is total / n + the largest group, at most a device's memory: what an operation needs to stay, beside the
    largest temporary bytes. An operation whose group has a device goes there. Nothing is known of seconds, so this is a
    baseline. Raises NoRoomError for what does not fit so.
    Source: "Baechi" (SoCC 2020), section 3.1.
    """
    need = [value.num_bytes for value in graph.values]
    share = graph.total_bytes / devices.num + max(graph.reserved.values(), default=0.0)
    homes: list[int] = []
    bound: dict[int, int] = {}
    held, work, device = [0.0] * devices.num, [0.0] * devices.num, 0
    copies: set[tuple[int, int]] = set()

    def more(op: int, device: int) -> float:
        new = [value for value in graph.inputs[op] if homes[graph.values[value].source] != device]
        own = sum(need[value] for value in new if (value, device) not in copies)
        own += 0.0 if graph.keeps else sum(graph.values[value].held_bytes for value in graph.outputs[op])
        return own + (0.0 if graph.group_of[op] in bound else graph.reserved[graph.group_of[op]])

    for number, op in enumerate(graph.ops):
        group = graph.group_of[number]
        home = bound.get(group, device)
        while group not in bound:
            holds = held[home] + more(number, home)
            if holds <= share and holds + max(work[home], op.temporary) <= devices.memory_bytes:
                break
            home = device = device + 1
            if device == devices.num:
                raise NoRoomError(f"m-topo has filled all {devices.num} devices before {op.name!r}")
        held[home] += more(number, home)
        work[home] = max(work[home], op.temporary)
        copies |= {(value, home) for value in graph.inputs[number] if homes[graph.values[value].source] != home}
        bound[group] = home
        homes.append(home)
    schedule = replay(graph, devices, homes)
    full = [device for device, peak in enumerate(schedule.peak_bytes()) if peak > devices.memory_bytes]
    if full:
        raise NoRoomError(f"m-topo fills device {full[0]} beyond its memory")
    return schedule
