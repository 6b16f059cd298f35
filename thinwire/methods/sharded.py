"""The base of methods on the sharded host: formats, levels, a layout, and the plan that follows from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from thinwire.codecs import Cast, Codec, Identity, NonzeroRows
from thinwire.collectives import Topology
from thinwire.cost import Work
from thinwire.layout.buckets import BucketLayout, Unit, lay_out, sent_by
from thinwire.layout.formats import WireFormat, describe_formats
from thinwire.layout.levels import Levels
from thinwire.methods.interface import (
    CUTS_TENSORS,
    WEIGHTS_COME_AND_GO,
    Cuts,
    GradientMemory,
    Method,
    MethodPlan,
    agreement_sent,
)
from thinwire.methods.schedule import BACKWARD, END, FORWARD, Hop, PlannedExchange, PlannedExchanges, plain, shares_of
from thinwire.optim import SHARDED
from thinwire.table import Row


def as_differences(codec: Codec) -> bool:
    """Whether weights with this codec travel as differences: with all codecs except casts to a float type."""
    return not isinstance(codec, Identity | Cast)


class ShardedMethod(Method, ABC):
    """A choice of codecs for matrices and for vectors, and of the groups of ranks over which tensors are cut.

    By default weights are whole on every rank, and gradients are summed there until a step's last backward. Their mean,
    the masters and the optimizer state are cut over all ranks. A subclass has a `name`, `matrix` and `vector`;
    `thinwire.zero` runs it.
    """

    name: ClassVar[str]
    optimizers: ClassVar[tuple[str, ...]] = SHARDED
    optimizers_reason: ClassVar[str] = CUTS_TENSORS
    shards_optimizer: ClassVar[bool] = True

    # Under compress_fsdp, gathers of unchanged weights stay inside a node.
    secondary: ClassVar[bool] = True

    def gradient_memory(self, numels: Sequence[int]) -> GradientMemory | None:
        """Further state of the reductions besides error feedback, or None.

        numels: elements of a piece of each parameter.
        """
        return None

    def memory_bytes(self, layout: BucketLayout) -> int:
        """Bytes of state that a rank keeps for a layout's reductions."""
        num_pieces = sum(map(math.prod, layout.lossy_pieces.values()))
        if layout.wire.feedback:
            return 4 * num_pieces * layout.shard_numel
        if fresh := layout.wire.fresh:
            num_nodes = math.prod(layout.lossy_pieces.get("inter", (0,)))
            return 4 * (num_nodes * (1 if fresh == 1 else 2) + bool(num_nodes)) * layout.shard_numel
        memory = self.gradient_memory([layout.shard_numel])
        return num_pieces * memory.piece_bytes if memory is not None else 0

    @abstractmethod
    def matrix(self) -> WireFormat:
        """For parameters of two and more dimensions."""

    @abstractmethod
    def vector(self) -> WireFormat:
        """For parameters of at most one dimension: norms and biases."""

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs whose kernels are compiled before the workers start."""
        return (*self.matrix().codecs, *self.vector().codecs)

    def levels(self, topology: Topology) -> Levels:
        """The groups of ranks over which weights and gradients are cut.

        Raises ConfigError if they do not fit the grid.
        """
        return Levels(topology, 1, topology.world_size)

    def not_compiled(self, topology: Topology) -> str:
        """See Method."""
        return WEIGHTS_COME_AND_GO if self.levels(topology).weights_over > 1 else ""

    def units(
        self,
        model: nn.Module,
        trained: Mapping[str, Tensor],
        groups: Sequence[Levels],
        group_of: Callable[[str], int],
        bucket_numel: int | None,
    ) -> tuple[Unit, ...]:
        """The layout of the parameters `trained`; see `layout.buckets.lay_out`."""
        tables = self.tables(model, trained)
        return lay_out(trained.items(), self, groups, lambda name: (group_of(name), None), bucket_numel, tables)

    def tables(self, model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, int]:
        """Elements of a row, of the parameters whose gradients travel by rows; by default none does."""
        return {}

    def describe(self, levels: Levels, units: Sequence[Unit]) -> list[Row]:
        """Rows of (asked for, in effect, why), for a group of more than one rank."""
        return describe_formats(self, levels.topology)

    def cuts(self, model: nn.Module, topology: Topology, names: Collection[str]) -> Cuts:
        """See Method."""
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        units = self.units(model, trained, [self.levels(topology)], lambda _: 0, None)
        return cut_by((layout for unit in units for layout in unit.layouts), names)

    def plan(self, model: nn.Module, topology: Topology, micro_batches: int) -> MethodPlan:
        """4 N/s1 bytes of weights, gradients, 12 N/P of masters and moments, and the whole units that pass through."""
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        levels = self.levels(topology)
        units = self.units(model, trained, [levels], lambda _: 0, None)
        layouts = [layout for unit in units for layout in unit.layouts]
        numel, shard = sum(layout.numel for layout in layouts), sum(layout.shard_numel for layout in layouts)
        staying = sum(unit.numel for unit in units if unit.stays)
        # One computes and the next one comes.
        others = sorted((unit.numel for unit in units if not unit.stays), reverse=True)[:2]
        if any(unit.module is not None for unit in units):
            gradients = numel // levels.gradients_over + (shard if levels.num_blocks > 1 else 0)
            passing = staying + sum(others[:1])
        else:
            gradients, passing = sum(param.numel() for param in trained.values()) + shard, 0
        passing += staying + sum(others) if levels.weights_over > 1 else 0
        lost = sum(map(self.memory_bytes, layouts))
        sent = agreement_sent(topology, len(trained)) | sent_by(units, micro_batches)
        return MethodPlan(
            weights=sum(layout.numel * layout.dtype.itemsize for layout in layouts) // levels.weights_over,
            gradients=4 * gradients,
            optimizer=12 * shard,
            passing=4 * passing,
            sent=sent,
            other={"error feedback": lost} if lost else {},
        )

    def exchanges(self, model: nn.Module, topology: Topology, micro_batches: int) -> PlannedExchanges:
        """Weights are sent bucket by bucket for the forward, gradients after each bucket's backward."""
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        levels = self.levels(topology)
        units = self.units(model, trained, [levels], lambda _: 0, None)
        names = [[span.name for layout in unit.layouts for span in layout.spans] for unit in units]
        found = [
            each
            for number, unit in enumerate(units)
            for layout in unit.layouts
            for each in exchanges_of(layout, number, micro_batches * (1 if unit.stays else 2), micro_batches)
        ]
        words = plain(agreement_sent(topology, len(trained)), END)
        shard = sum(layout.shard_numel for unit in units for layout in unit.layouts)
        # Gradient, both moments and the master are read, and all but the first written.
        return PlannedExchanges(shares_of(model, names), (*found, *words), kept_bytes=28.0 * shard)


def exchanges_of(layout: BucketLayout, unit: int, num_gathers: int, micro_batches: int) -> Iterator[PlannedExchange]:
    """The messages of a layout, as in `BucketLayout.sent`, with the bytes that are packed for them."""
    grid, wire = layout.levels.topology, layout.wire
    peers = {"inter": grid.num_nodes - 1, "intra": grid.local_size - 1}
    sums = {"inter": wire.inter, "intra": wire.intra}
    by_operation: dict[str, dict[str, int]] = {}
    for operation, level, num_bytes in layout.sent(num_gathers, micro_batches):
        held = by_operation.setdefault(operation, {})
        held[level] = held.get(level, 0) + num_bytes
    for operation, sent in by_operation.items():
        is_sum = operation.startswith("gradient")
        order = [level for level in ("intra", "pair", "inter") if sent.get(level)]
        hops = []
        for level in order if is_sum else order[::-1]:
            num, others = float(sent[level]), peers.get(level, 1)
            if is_sum:
                # What a rank keeps of its own goes the same way.
                packed = num * (others + 1) / others
                codec = sums.get(level, wire.intra)
                # Most of the work on a packet without some rows is that of the whole one.
                codec = codec.coded if isinstance(codec, NonzeroRows) else codec
                hops.append(
                    Hop(level, num, packs=Work(f"encode {codec}", packed), unpacks=Work(f"decode {codec}", packed))
                )
            else:
                packet = num / others
                is_first, is_last = level == order[-1], level == order[0]
                packs = Work(f"encode {wire.weights}", packet) if is_first else None
                whole = packet * layout.levels.topology.world_size if is_first and is_last else num + packet
                hops.append(
                    Hop(level, num, packs=packs, unpacks=Work(f"decode {wire.weights}", whole) if is_last else None)
                )
        if hops:
            yield PlannedExchange(operation, BACKWARD if is_sum else FORWARD, tuple(hops), unit)


def cut_by(layouts: Iterable[BucketLayout], names: Collection[str]) -> Cuts:
    """For each parameter, its shape and the elements [first, last) whose masters each rank has; see `Method.cuts`."""
    found: Cuts = {}
    for layout in layouts:
        for span in (span for span in layout.spans if span.name in names):
            parts = []
            for rank in range(layout.levels.topology.world_size):
                own, start = layout.owned(span, rank), layout.shard_start(rank) - span.start
                parts.append((start + own.start, start + own.stop))
            found[span.name] = span.shape, parts
    return found
