"""m-TOPO: operations in topological order fill one device after the other."""

from __future__ import annotations

from thinwire.placement.board import DeviceSchedule, NoRoomError, replay
from thinwire.placement.graph import Devices, OpGraph


def m_topo(graph: OpGraph, devices: Devices) -> DeviceSchedule:
    """Fill device after device with operations in topological order, each up to an equal share and to its memory.

    The share is total / n + the largest group, in bytes that groups need until the end. An operation whose group has a
    device goes there. It ignores seconds, so it is a baseline. Raises NoRoomError if operations don't fit this way.
    Source: "Baechi" (SoCC 2020), section 3.1.
    """
    share = graph.total_bytes / devices.num + max(graph.reserved.values(), default=0.0)
    homes: list[int] = []
    bound: dict[int, int] = {}
    # What groups need, that and copies, and the largest temporary bytes.
    held, filled, temporary, device = [0.0] * devices.num, [0.0] * devices.num, [0.0] * devices.num, 0
    copies: set[tuple[int, int]] = set()
    for number, op in enumerate(graph.ops):
        group = graph.group_of[number]
        while True:
            home = bound.get(group, device)
            new = {
                (value, home) for value in graph.inputs[number] if homes[graph.values[value].source] != home
            } - copies
            own = graph.reserved[group] if group not in bound else 0.0
            more = own + sum(graph.values[value].num_bytes for value, _ in new)
            more += 0.0 if graph.keeps else sum(graph.values[value].held_bytes for value in graph.outputs[number])
            most = filled[home] + more + max(temporary[home], op.temporary)
            if group in bound or (held[home] + own <= share and most <= devices.memory_bytes):
                break
            device += 1
            if device == devices.num:
                raise NoRoomError(f"m-topo has filled all {devices.num} devices before {op.name!r}")
        held[home], filled[home] = held[home] + own, filled[home] + more
        temporary[home] = max(temporary[home], op.temporary)
        copies |= new
        bound[group] = home
        homes.append(home)
    schedule = replay(graph, devices, homes)
    full = [device for device, peak in enumerate(schedule.peak_bytes()) if peak > devices.memory_bytes]
    if full:
        raise NoRoomError(f"m-topo fills device {full[0]} beyond its memory")
    return schedule
