"""Where the parts of a training lie under a budget, and the bytes that a step moves between memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from thinwire.layout.buckets import BucketLayout
from thinwire.layout.layers import looked_up
from thinwire.methods.memory.floor import KERNEL_BYTES, TOUCHED_BYTES, Floor, held_bytes, num_held
from thinwire.methods.memory.residency import AT_ONCE, FP32_BYTES, Residency
from thinwire.methods.memory.setup import NUM_STATES, SMALL_NUMEL, Setup, names_of

# Of the room in a budget, what is left for checkpoints, and what of the rest is used for what may stay.
SPARE_BYTES, USED_SHARE = 100_000_000, 2 / 3
# Without a budget, one of so many parts of the weights' bytes is for updates that wait: enough for 8 bits an element.
UNBOUNDED_PARTS = 4


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


def waits_unbounded(weights_bytes: int) -> int:
    """How many bytes of updates may wait in memory without a budget, beside so many bytes of weights on the disk."""
    return weights_bytes // UNBOUNDED_PARTS


def deferred(layouts: Iterable[BucketLayout], room_bytes: int) -> list[BucketLayout]:
    """Of layouts in order of forward, those whose updates wait in memory until their weights are used."""
    found = list[BucketLayout]()
    for layout in layouts:
        if layout.update_bytes <= room_bytes:
            room_bytes -= layout.update_bytes
            found.append(layout)
    return found


def placed(residency: Residency, setup: Setup) -> Iterator[MemoryPart]:
    """The parts of a rank's training after the free memory is known; see `Residence.after_update`.

    With W bytes of weights on the disk, of which C fit in memory, B of them for the bucket that comes next, and m
    micro-batches, a step reads 2 m (W - C + B), and writes W, or nothing if all stay. An update that overwrites weights
    reads none. One that adds differences reads all of them once more; but where what other ranks send waits in memory
    until the next forward, it reads only the part of which this rank has the masters. A layer that is computed again is
    used twice in a row: of its bytes those above C - B are read once more. Tables of which a forward takes rows are
    read once, for an update that adds, and stay last; their rows are not counted. States are read and written except
    those that stay. A durable step writes all of them, and the weights that belong to this rank's masters. An optimizer
    that looks across matrices reads its state for each part of its update; what is read in pages, for the first part
    too, where the rest is not. Mean gradients are written and read once, if they lie on the disk.

    residency: without "auto", besides for the optimizer.
    """
    floor, plan, kept = Floor.of(residency, setup), setup.plan, setup.kept
    budget = residency.memory_bytes
    left = 0 if budget is None else stays(budget - floor.step_bytes)
    for name, num_bytes in floor.parts.items():
        if name == "gradients" and residency.gradients == "disk":
            mean = setup.mean_bytes
            yield MemoryPart(name, num_bytes, mean, mean, mean)
        elif name == "activations" and kept is not None and residency.spills:
            moved = setup.micro_batches * residency.spilled(kept)
            yield MemoryPart(name, num_bytes, residency.spilled(kept), moved, moved)
        elif name not in ("weights", "optimizer"):
            yield MemoryPart(name, num_bytes)
    if residency.weights == "disk":
        weights, left = _weights_on_disk(residency, setup, left)
        yield weights
    else:
        yield MemoryPart("weights", plan.weights)
    if residency.optimizer == "memory":
        yield MemoryPart("masters and optimizer state", setup.states.whole)
    else:
        yield _states_on_disk(residency, setup, floor, left)


def in_use(parts: Iterable[MemoryPart], setup: Setup) -> int:
    """Bytes of the parts that a worker touches, its anonymous memory.

    A budget counts what it reserves too, such as stacks of threads.
    """
    untouched = setup.process.data - setup.process.anonymous + KERNEL_BYTES - TOUCHED_BYTES
    return sum(part.memory for part in parts) - untouched


def _weights_on_disk(residency: Residency, setup: Setup, left: int) -> tuple[MemoryPart, int]:
    """Weights, and the bytes that are left when those stay that fit into `left`."""
    large = [unit for unit in setup.units if unit.numel >= SMALL_NUMEL]
    over = setup.method.levels(setup.topology).weights_over
    sizes = [FP32_BYTES * unit.numel // over for unit in large]
    by_rows = looked_up(setup.model) if over == 1 else set[str]()
    # Weights that are gathered are read whole.
    is_table = [by_rows.issuperset(names_of(unit)) for unit in large]
    tables = sum(size for size, is_one in zip(sizes, is_table, strict=True) if is_one)
    total, largest = sum(sizes), max(sizes, default=0)
    held = held_bytes(residency, setup) if over == 1 else num_held(residency) * largest
    least = min(held, total)
    waiting = _waiting(residency, setup, left if residency.memory_bytes is not None else waits_unbounded(total))
    num_waiting = sum(layout.update_bytes for layout in waiting)
    left = max(0, left - num_waiting)
    staying = min(total, least + left)
    found = staying if staying == total else staying - largest
    passing, looked = max(0, total - tables - found), min(tables, total - found)
    read = 2 * setup.micro_batches * passing
    for unit, is_one in zip(large, is_table, strict=True):
        for layout in (layout for layout in unit.layouts if layout.adds_updates):
            numel = layout.shard_numel if layout in waiting else layout.numel // over
            read += FP32_BYTES * numel * (looked if is_one else passing) // (tables if is_one else total - tables)
    if residency.recomputes and over == 1:
        read += setup.micro_batches * sum(max(0, size - found) for size in setup.layer_bytes)
    written = 0 if staying == total else total
    held = setup.plan.weights - total + staying + num_waiting
    return MemoryPart("weights", held, total, read, written), left - (staying - least)


def _waiting(residency: Residency, setup: Setup, room_bytes: int) -> list[BucketLayout]:
    """The layouts whose updates wait in memory, if these may take so many bytes."""
    if residency.durable or setup.is_cut:
        return []
    embedded = {id(module.weight) for module in setup.model.modules() if isinstance(module, nn.Embedding)}
    by_rows = {name for name, param in setup.model.named_parameters() if id(param) in embedded}
    large = (unit for unit in setup.units if unit.numel >= SMALL_NUMEL and by_rows.isdisjoint(names_of(unit)))
    return deferred((layout for unit in large for layout in unit.layouts if layout.adds_updates), room_bytes)


def _states_on_disk(residency: Residency, setup: Setup, floor: Floor, left: int) -> MemoryPart:
    """Masters and optimizer state, of which so many bytes stay in memory as `left` says."""
    states, name = setup.states, "masters and optimizer state"
    in_passing = floor.parts.get("optimizer", 0)
    if states.disk:
        coded = residency.coded_bytes(states.masters)
        whole = states.whole - states.masters + coded if residency.codes_masters else states.whole
        staying = min(whole, left) if residency.optimizer == "auto" else 0
        # Updated masters are sent from the disk if gradients did not wait for them in memory.
        reads = states.num_reads + (residency.gradients == AT_ONCE)
        held, moved = min(in_passing + staying, states.whole), whole - staying
        written = whole + states.masters if residency.durable else moved
        # What is read in pages stays first.
        paged = max(0, states.paged - staying)
        disk = residency.piece_disk_bytes(states.disk, states.masters)
        return MemoryPart(name, held, disk, reads * moved + paged, written)
    whole = int(residency.state_share * states.whole)
    staying = min(whole, left) if residency.optimizer == "auto" else 0
    written = whole + states.whole // NUM_STATES if residency.durable else whole - staying
    disk, held = residency.disk_bytes(states.whole), min(in_passing + staying, states.whole)
    return MemoryPart(name, held, disk, whole - staying, written)


def efficiency(intensity: float, disk_rate: float, flops: float) -> float:
    """The share of time in which a rank computes, if it waits for what a disk moves: a b / (a b + f).

    a = intensity, see `intensities`. b = disk_rate, bytes per second. f = flops, operations per second. Source:
    ZeRO-Infinity (SC 2021), equation 6.
    """
    return intensity * disk_rate / (intensity * disk_rate + flops)


def intensities(tokens: int, micro_batches: int = 1, width: int | None = None) -> dict[str, float]:
    """Operations of a step per byte that it moves, by part: ZeRO-Infinity's for 16-bit weights, equations 9 to 11.

    tokens: of a micro-batch. width: of the layers whose inputs are kept; None: not known, and that part is left out.
    """
    found: dict[str, float] = {"weights": tokens, "masters and optimizer state": tokens * micro_batches / 4}
    return found if width is None else found | {"inputs of layers": 24 * width}
