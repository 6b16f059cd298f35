"""Where the parts of a training lie under a budget, and the bytes that a step moves between memory and disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from thinwire.collectives import Topology
from thinwire.layout.buckets import Unit
from thinwire.layout.layers import looked_up
from thinwire.methods.memory.floor import NUM_STATES, SMALL_NUMEL, Floor, KeptBytes, mean_bytes, units_of
from thinwire.methods.memory.residency import FP32_BYTES, Residency
from thinwire.methods.sharded import ShardedMethod

# Of the room in a budget, what is left for checkpoints, and what of the rest is used for what may stay.
SPARE_BYTES, USED_SHARE = 100_000_000, 2 / 3


class MemoryPart(NamedTuple):
    """A part of what a rank holds, in bytes: its peak in memory, its size on the disk, and the traffic of a step."""

    name: str
    memory: int
    disk: int = 0
    read: int = 0
    written: int = 0


def stays(room_bytes: int) -> int:
    """How many bytes more may stay in memory if `room_bytes` are free."""
    return max(0, int((room_bytes - SPARE_BYTES) * USED_SHARE))


def placed(
    residency: Residency, method: ShardedMethod, model: nn.Module, topology: Topology, micro_batches: int,
    kept: KeptBytes | None = None,
) -> Iterator[MemoryPart]:  # fmt: skip
    """The parts of a rank's training after the free memory is known; see `Residence.after_update`.

    With W bytes of weights on the disk, of which C stay in memory, and m micro-batches, a step reads (2 m + 1) (W - C),
    or (3 m + 1) (W - C) if layers are recomputed, and writes W, or nothing if all stay. Tables of which a forward takes
    rows are read once, for the update, and stay last; their rows are not counted. States are read and written
    except those that stay. A durable step writes all of them, and the weights that belong to this rank's masters. Mean
    gradients are written and read once, if they lie on the disk.

    residency: without "auto", besides for the optimizer. kept: see `settled`. model: only its shapes are used.
    """
    floor = Floor.of(residency, method, model, topology, micro_batches, kept)
    plan = method.plan(model, topology, micro_batches)
    budget = residency.memory_bytes
    left = 0 if budget is None else stays(budget - floor.num_bytes)
    for name, num_bytes in floor.parts.items():
        if name == "gradients" and residency.gradients == "disk":
            mean = mean_bytes(plan)
            yield MemoryPart(name, num_bytes, mean, mean, mean)
        elif name == "activations" and kept is not None and residency.spills:
            moved = micro_batches * residency.spilled(kept)
            yield MemoryPart(name, num_bytes, residency.spilled(kept), moved, moved)
        elif name not in ("weights", "optimizer"):
            yield MemoryPart(name, num_bytes)
    if residency.weights == "disk":
        large = [unit for unit in units_of(method, model, topology) if unit.numel >= SMALL_NUMEL]
        sizes, by_rows = [FP32_BYTES * unit.numel for unit in large], looked_up(model)
        tables = sum(size for size, unit in zip(sizes, large, strict=True) if by_rows.issuperset(names_of(unit)))
        total, least = sum(sizes), min(2 * max(sizes, default=0), sum(sizes))
        staying = min(total, least + left)
        left -= staying - least
        passes = micro_batches * (3 if residency.recomputes else 2) + 1
        used = total - tables
        read = passes * max(0, used - staying) + min(tables, total - staying)
        written = 0 if staying == total else total
        yield MemoryPart("weights", plan.weights - total + staying, total, read, written)
    else:
        yield MemoryPart("weights", plan.weights)
    if residency.optimizer == "memory":
        yield MemoryPart("masters and optimizer state", plan.optimizer)
    else:
        whole = int(residency.state_share * plan.optimizer)
        staying = min(whole, left) if residency.optimizer == "auto" else 0
        written = whole + plan.optimizer // NUM_STATES if residency.durable else whole - staying
        disk, held = residency.disk_bytes(plan.optimizer), min(floor.parts["optimizer"] + staying, plan.optimizer)
        yield MemoryPart("masters and optimizer state", held, disk, whole - staying, written)


def names_of(unit: Unit) -> set[str]:
    """The names of the parameters in a unit."""
    return {name for layout in unit.layouts for name in layout.names}


def efficiency(tokens: int, disk_rate: float, flops: float) -> float:
    """The share of time in which a rank computes, if it waits for weights that come from a disk: a b / (a b + f).

    a = tokens of a micro-batch: operations per byte of weights that moves. b = disk_rate, bytes per second. f = flops,
    operations per second. Source: ZeRO-Infinity (SC 2021), equations 6 and 9.
    """
    return tokens * disk_rate / (tokens * disk_rate + flops)
