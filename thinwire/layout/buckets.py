"""Buckets: layouts of parameters that travel together, aligned to codec blocks and cut into one shard per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import NonzeroRows
from thinwire.collectives.gather import gather_bytes
from thinwire.collectives.reduce import reduce_bytes
from thinwire.layout.formats import LevelFormat, Strategy, WireFormat
from thinwire.layout.layout import Layout, Span
from thinwire.layout.levels import Levels

# Padding at a layout's end is half of world_size * block elements on average: below 1 percent with this many.
MIN_BLOCKS_PER_SHARD = 64
DEFAULT_BUCKET_NUMEL = 1 << 19


@dataclass(frozen=True, kw_only=True)
class BucketLayout(Layout):
    """Parameters of one wire format, dtype and group, which travel together as one row of `numel` elements.

    Attributes:
        stream, first_counter: number the elements for the codecs' randomness, whatever the size of a bucket.
        group: number of the group of ranks that share the parameters.
        module: path of the module that the parameters belong to; their gradients are sent after every backward. None:
            the parameters belong to several modules, and their gradients are sent once a step.
        row_width: elements of a row of the only parameter, if its gradients travel by rows; else 0.
    """

    wire: WireFormat
    levels: Levels
    dtype: torch.dtype
    stream: int
    first_counter: int
    group: int = 0
    module: str | None = None
    row_width: int = 0

    @property
    def shard_numel(self) -> int:
        """Number of elements for which one rank holds the master weights."""
        return self.numel // self.levels.topology.world_size

    @property
    def row_numel(self) -> int:
        """Number of elements in a slice of the gradients."""
        return self.numel // self.levels.gradients_over

    def shard_start(self, rank: int) -> int:
        """The first element for which `rank` holds the master weights."""
        return self.levels.piece(rank) * self.shard_numel

    def owned(self, span: Span, rank: int) -> slice:
        """The part of the rank's shard that belongs to `span`; empty if they don't overlap."""
        first = self.shard_start(rank)
        start = max(span.start - first, 0)
        return slice(start, max(min(span.end - first, self.shard_numel), start))

    def kept(self, span: Span, rank: int) -> Iterator[tuple[int, slice]]:
        """Where parts of the span lie in the rank's compute weights: (first element in the whole tensor, place)."""
        levels, n = self.levels, self.row_numel
        for row in range(levels.num_rows):
            start = (row * levels.weights_over + rank % levels.weights_over) * n
            first, last = max(span.start, start), min(span.end, start + n)
            if first < last:
                yield first, slice(row * n + first - start, row * n + last - start)

    @property
    def lossy_pieces(self) -> dict[str, tuple[int, ...]]:
        """For each hop with a lossy codec of gradients, the shape of the pieces (one shard long) that it encodes."""
        return self.wire.lossy_pieces(self.levels.topology)

    @property
    def has_replica(self) -> bool:
        """Whether the weights used for computing differ from the master weights."""
        is_lossy = self.dtype != torch.float32 or not self.wire.weights.traits.lossless
        return is_lossy and self.levels.topology.world_size > 1

    @property
    def adds_updates(self) -> bool:
        """Whether updated weights are made from the ones before; else they are overwritten."""
        return self.wire.differences and self.num_updates > 1

    @property
    def num_updates(self) -> int:
        """Number of packets of an update that a rank's compute weights are made from."""
        return self.levels.num_blocks * self.levels.num_rows

    @property
    def update_bytes(self) -> int:
        """The most bytes of these packets."""
        return self.num_updates * self.wire.weights.packet_bytes(self.shard_numel)

    @property
    def update(self) -> str:
        """Name in the meter of the updated weights on their way from the masters."""
        return "weights" if self.module is None else "refresh"

    def gradients_by_rows(self, num_rows: int) -> dict[str, int]:
        """Bytes of gradients that a rank sends on each level, if a table's has so many rows on every rank.

        The rows lie evenly on the ranks that own them; no two ranks of a node have the same.
        """
        (span,), grid, n = self.spans, self.levels.topology, self.shard_numel
        num_nodes, found = grid.num_nodes, dict[str, int]()
        packets = {"intra": (grid.local_size - 1) * num_nodes, "inter": num_nodes - 1}
        here = {"intra": num_rows, "inter": min(span.shape[0], num_rows * grid.local_size)}
        for level, codec in (("intra", self.wire.intra), ("inter", self.wire.inter)):
            packet = codec.packet_bytes(n)
            if isinstance(codec, NonzeroRows):
                of_row = -(-self.row_width // codec.width) + (self.row_width % codec.width > 0)
                packet = codec.bytes_of(n, -(-here[level] * of_row // grid.world_size))
            found[level] = packets[level] * packet
        return found

    def sent(self, num_gathers: int, micro_batches: int) -> Iterator[tuple[str, str, int]]:
        """Yield (operation, level, payload bytes) of everything that a rank sends in a step."""
        levels, wire, grid = self.levels, self.wire, self.levels.topology
        if isinstance(wire, LevelFormat):
            packets = levels.num_rows * wire.shards.packet_bytes(self.row_numel)
            shards = gather_bytes(grid.subgroup(levels.neighbours(0)), packets)
            yield "weights", levels.inside, num_gathers * shards["intra"]
            yield "weights", "inter", num_gathers * shards["inter"]
        block, column, stack = (grid.subgroup(group(0)) for group in (levels.block, levels.column, levels.stack))
        packet = wire.weights.packet_bytes(self.shard_numel)
        many = reduce_bytes(block, self.row_numel, wire.intra, wire.inter)
        once = reduce_bytes(column, self.shard_numel, wire.intra, wire.inter)
        to_column, to_stack = gather_bytes(column, packet), gather_bytes(stack, levels.num_blocks * packet)
        for level in ("intra", "inter"):
            yield "gradients", level, (1 if self.module is None else micro_batches) * many[level]
            if self.module is not None:
                yield "gradient sums", level, once[level]
            yield self.update, level, to_column[level] + to_stack[level]


@dataclass(frozen=True)
class Unit:
    """Layouts whose weights are gathered together, and whose gradients are sent together.

    stays: the weights stay whole from forward to backward. True for the root, which is needed at both ends, and for the
    last module, whose backward follows its forward.
    """

    layouts: tuple[BucketLayout, ...]
    stays: bool = True

    @property
    def module(self) -> str | None:
        """See BucketLayout."""
        return self.layouts[0].module

    @property
    def numel(self) -> int:
        return sum(layout.numel for layout in self.layouts)


def lay_out(
    trained: Iterable[tuple[str, Tensor]],
    method: Strategy,
    groups: Sequence[Levels],
    place: Callable[[str], tuple[int, str | None]],
    bucket_numel: int | None = None,
    tables: Mapping[str, int] | None = None,
) -> tuple[Unit, ...]:
    """Lay out parameters in the given order. One layout has one wire format, dtype, group and module.

    Reads only shapes and dtypes. Every parameter starts at a multiple of its format's block, so no quantisation group
    spans two parameters, and results do not depend on the size of a bucket.

    Args:
        place: name -> (index in `groups` of the parameter's levels, its module or None).
        bucket_numel: approximate size of the buckets for parameters that belong to no module. A larger parameter gets a
            bucket of its own.
        tables: elements of a row, of parameters whose gradients travel by rows; see WireFormat.by_rows. Each is a
            bucket of its own; the randomness of no parameter depends on it.
    """
    formats = {True: method.vector(), False: method.matrix()}
    latest: dict[tuple, int] = {}
    counters: dict[tuple, int] = {}
    layouts: list[BucketLayout] = []
    for name, tensor in trained:
        is_vector = tensor.dim() < 2
        wire, (group, module) = formats[is_vector], place(name)
        key, world_size = (module, is_vector, tensor.dtype, group), groups[group].topology.world_size
        counted = _round_up(tensor.numel(), wire.block)
        row_width = (tables or {}).get(name, 0) if world_size > 1 else 0
        if row_width:
            wire = wire.by_rows(row_width, tensor.numel() // (MIN_BLOCKS_PER_SHARD * world_size))
            row_width *= wire.has_rows
        length = _round_up(tensor.numel(), wire.block)
        unit = wire.block * world_size
        limit = max(bucket_numel or DEFAULT_BUCKET_NUMEL, unit if bucket_numel else MIN_BLOCKS_PER_SHARD * unit)
        layout = layouts[latest[key]] if key in latest else None
        is_apart = row_width > 0 or (layout is not None and layout.row_width > 0)
        if layout is None or is_apart or (module is None and layout.numel + length > limit):
            stream = list(counters).index(key) if key in counters else len(counters)
            layout = BucketLayout(
                wire=wire, levels=groups[group], dtype=tensor.dtype, stream=stream,
                first_counter=counters.get(key, 0), group=group, module=module, row_width=row_width,
            )  # fmt: skip
            latest[key] = len(layouts)
            layouts.append(layout)
        span = Span(name, tensor.shape, layout.width, length)
        layouts[latest[key]] = replace(layout, spans=(*layout.spans, span), width=layout.width + length)
        counters[key] = counters.get(key, 0) + counted
    units: dict[object, list[BucketLayout]] = {}
    for number, layout in enumerate(layouts):
        whole = _round_up(layout.numel, layout.wire.block * layout.levels.topology.world_size)
        key_of_unit = number if layout.module is None else layout.module
        units.setdefault(key_of_unit, []).append(replace(layout, width=whole))
    last = next(reversed(units), None)
    return tuple(
        Unit(tuple(held), stays=held[0].module in (None, "") or key_of_unit == last)
        for key_of_unit, held in units.items()
    )


def sent_by(units: Iterable[Unit], micro_batches: int) -> dict[tuple[str, str], int]:
    """Payload bytes of weights and gradients that a rank sends in one step, by (operation, level)."""
    sent: dict[tuple[str, str], int] = {}
    for unit in units:
        num_gathers = micro_batches * (1 if unit.stays else 2)
        for layout in unit.layouts:
            for operation, level, num_bytes in layout.sent(num_gathers, micro_batches):
                sent[operation, level] = sent.get((operation, level), 0) + num_bytes
    return sent


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
