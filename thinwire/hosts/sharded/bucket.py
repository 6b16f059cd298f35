"""The memory of a layout on this rank, and the jobs that send it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.checkpoint import Piece
from thinwire.codecs import Codec, Identity, derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.feedback import Estimates, Feedback
from thinwire.collectives.gather import all_gather_packets
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.layout.buckets import BucketLayout, Unit
from thinwire.layout.formats import LevelFormat
from thinwire.layout.layout import Span
from thinwire.state.replicas import fingerprint


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter and its place in a bucket."""

    span: Span
    param: nn.Parameter
    bucket: FlatBucket = field(repr=False)

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def owned(self) -> slice:
        """The part of this rank's shard that belongs to the parameter."""
        return self.bucket.layout.owned(self.span, self.bucket.comm.rank)

    @property
    def offset(self) -> int:
        """Index in the parameter of the first element of `owned`."""
        return self.bucket.layout.shard_start(self.bucket.comm.rank) + self.owned.start - self.span.start

    def piece(self, shard: Tensor) -> Piece:
        """The parameter's part of a tensor that has the shape of this rank's shard, as a Piece."""
        return Piece(self.span.numel, self.offset, shard[self.owned])


class Away(Protocol):
    """Holds the masters of buckets outside the buckets' own memory."""

    def masters(self, bucket: FlatBucket) -> Tensor:
        """A copy of the bucket's masters."""
        ...

    def set_masters(self, bucket: FlatBucket, values: Tensor, first: int) -> None:
        """Set the masters from element `first` on."""
        ...

    def sent(self, bucket: FlatBucket) -> None:
        """Note that the updated masters in the bucket's `shard_grad` are needed no more."""
        ...


class FlatBucket:
    """Parameters that travel together, on this rank.

    Attributes:
        live: the whole weights [numel], in the model's dtype; the model's parameters are views into it. If weights are
            cut (s1 > 1), its memory exists only while they are needed.
        shard: the compute weights that stay in memory, [numel / s1], a row for each slice of the stack; if s1 is 1,
            `live` itself.
        own: the part of `shard` for which this rank has the masters.
        master, shard_grad: fp32 [numel / P], this rank's slice of the masters and of the mean gradient.
        sums: fp32 [numel / s2], sum over the block of the gradients of this step's micro-batches, if gradients are sent
            after every backward.
        feedback: error feedback for the next reduction, or None.
        num_losses: number of ranks whose mean loss is trained: those of `comm`, and others that hold other parameters
            in place of these.
        away: holds the masters if `master` does not. From an update to the next reduction, `shard_grad` then holds the
            updated masters, until all ranks have them.
        passes: the memory of `shard` comes and goes.
    """

    def __init__(
        self, layout: BucketLayout, params: Mapping[str, nn.Parameter], comm: Communicator, num_losses: int,
        has_masters: bool = True,
    ) -> None:  # fmt: skip
        """Move the parameters into one flat tensor and make this rank's shards. Padding is zero everywhere.

        has_masters: the masters lie in this bucket.
        """
        self.layout, self.comm, self.num_losses = layout, comm, num_losses
        self.slots = [Slot(span, params[span.name], self) for span in layout.spans]
        self.live = torch.zeros(layout.numel, dtype=layout.dtype, device=self.slots[0].param.device)
        for slot in self.slots:
            slot.span.of(self.live).copy_(slot.param.data)
            slot.param.data = slot.span.of(self.live)
        levels, rank, n = layout.levels, comm.rank, layout.shard_numel
        self.shard, first = self.live, layout.shard_start(rank)
        self.master = self.live[first : first + (n if has_masters else 0)].float().clone()
        if levels.weights_over > 1:
            rows = self.live.view(levels.num_rows, levels.weights_over, -1)
            self.shard = rows[:, rank % levels.weights_over].reshape(-1).clone()
            row = rank % levels.gradients_over // levels.weights_over
            first = row * layout.row_numel + rank // levels.gradients_over * n
        self.own = self.shard[first : first + n]
        self.shard_grad = torch.zeros(n, device=self.live.device)
        self.sums = self.shard_grad
        if layout.module is not None and levels.num_blocks > 1:
            self.sums = torch.zeros(layout.row_numel, device=self.live.device)
        self.feedback: Callable[[], Feedback | None] = lambda: None
        self.away: Away | None = None
        self.passes = False
        self.note()

    @property
    def shard_bytes(self) -> int:
        """Bytes of `shard_grad`."""
        return self.shard_grad.numel() * self.shard_grad.itemsize

    def hold_gradients(self) -> None:
        """Give `shard_grad` memory, if it has none."""
        storage = self.shard_grad.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.shard_bytes)

    @property
    def masters(self) -> Tensor:
        """The masters, fp32 [numel / P], wherever they lie. Read only."""
        return self.master if self.away is None else self.away.masters(self)

    def set_masters(self, values: Tensor, first: int = 0) -> None:
        """Set the masters from element `first` on."""
        if self.away is None:
            self.master[first : first + values.numel()] = values
        else:
            self.away.set_masters(self, values, first)

    def note(self) -> None:
        """Record a fingerprint of the weights that this rank owns, to notice later if other code changes them."""
        self.seen = fingerprint(self.own) if self.layout.levels.weights_over == 1 else 0

    def adopt(self, slot: Slot, value: Tensor) -> None:
        """Use a parameter's whole weights as this rank's compute weights and masters."""
        flat, layout, rank = value.reshape(-1), self.layout, self.comm.rank
        for first, place in layout.kept(slot.span, rank):
            self.shard[place] = flat[first - slot.span.start :][: place.stop - place.start]
        self.set_masters(flat[slot.offset :][: slot.owned.stop - slot.owned.start], slot.owned.start)

    def spread(self, own: Tensor) -> None:
        """Set the compute weights on all ranks: each rank gives the values that it owns. A collective."""
        values = own.float()
        self.comm.wait(self.comm.submit(lambda link: self.refresh(link, values, Identity(), False, 0)))

    @property
    def whole_masters(self) -> Tensor:
        """The masters of all ranks, fp32 [numel]. A collective."""
        gathered = self.comm.wait(self.comm.all_gather_exact(self.masters))
        order = [self.layout.levels.piece(rank) for rank in range(self.comm.world_size)]
        return torch.empty_like(gathered).index_copy_(0, torch.tensor(order, device=gathered.device), gathered).view(-1)

    def gather(self, link: Link) -> Rounds[None]:
        """live = C(shard) of the s1 neighbours, including this rank, so that all compute with the same weights."""
        levels, n, wire = self.layout.levels, self.layout.row_numel, self.layout.wire
        assert isinstance(wire, LevelFormat)
        group, device = link.subgroup(levels.neighbours(link.rank), levels.inside), self.live.device
        packets = link.scratch("shards", levels.num_rows, wire.shards.packet_bytes(n), device=device)
        with link.timed("encode_s", "weights"):
            for row, packet in zip(self.shard.view(levels.num_rows, n), packets, strict=True):
                # As below, of a shard that comes and goes.
                row = link.scratch("row", n, dtype=row.dtype, device=device).copy_(row) if self.passes else row
                wire.shards.encode(row, out=packet)
        gathered = yield from all_gather_packets(group, packets.view(-1), "weights")
        whole, grid = self.live.view(levels.num_rows, levels.weights_over, n), group.topology
        # Not straight into `live`: a kernel's view of it, which is numpy's, would pin its memory.
        values = link.scratch("decoded", n, dtype=torch.float32, device=device)
        with link.timed("decode_s", "weights"):
            for rank in range(grid.world_size):
                theirs = gathered[grid.local_rank(rank), grid.node(rank)].view_as(packets)
                for row, packet in enumerate(theirs):
                    whole[row, rank].copy_(wire.shards.decode(packet, n, out=values))

    def reduce(
        self, link: Link, grads: list[Tensor | None], *, seed: int, first: bool = True, last: bool = True
    ) -> Rounds[None]:
        """shard_grad = sum over all ranks of `grads` / num_losses.

        If gradients are sent after every backward: each time, the block's sum of this rank's slice is added to `sums`;
        the last time, shard_grad becomes the sum over all blocks.
        """
        layout, rank = self.layout, link.rank
        levels, wire, counter = layout.levels, layout.wire, layout.first_counter
        flat = link.scratch("gradient", layout.numel, dtype=torch.float32, device=self.live.device)
        layout.pack(grads, flat)
        grads.clear()
        once, feedback = layout.module is None, self.feedback()
        total = yield from reduce_scatter(
            link.subgroup(levels.block(rank)), flat, wire.intra, wire.inter,
            seed=seed if once else derive_seed(seed, rank // levels.gradients_over), counter=counter,
            operation="gradients", lost=feedback,
        )  # fmt: skip
        if isinstance(feedback, Estimates):
            total = feedback.add_up(total)
        if not once:
            self.hold_gradients()
            self.sums.copy_(total) if first else self.sums.add_(total)
            if not last:
                return
            counter += rank % levels.gradients_over * layout.row_numel
            total = yield from reduce_scatter(
                link.subgroup(levels.column(rank)), self.sums, wire.intra, wire.inter,
                seed=derive_seed(seed, levels.num_blocks), counter=counter, operation="gradient sums",
            )  # fmt: skip
        self.hold_gradients()
        torch.mul(total, 1.0 / self.num_losses, out=self.shard_grad)

    def refresh(self, link: Link, message: Tensor, codec: Codec, differences: bool, seed: int) -> Rounds[None]:
        """shard = C(message), or shard += C(message - shard), from all owners of a piece of it.

        A packet crosses between blocks once, then spreads in the stack. All copies of a shard decode the same packets.
        """
        n, operation, device = self.layout.shard_numel, self.layout.update, self.live.device
        if self.layout.num_updates == 1:
            self.shard.copy_(message)
            return self.note()
        with link.timed("encode_s", operation):
            if differences:
                difference = link.scratch("difference", n, dtype=torch.float32, device=device)
                message = torch.sub(message, self.own, out=difference)
            packet = link.scratch("update", codec.packet_bytes(n), device=device)
            self.encode(message, codec, seed, packet)
        rows = yield from self.exchange(link, packet, codec)
        values = None
        if self.passes or self.shard.dtype != torch.float32:
            values = link.scratch("decoded", n, dtype=torch.float32, device=device)
        with link.timed("decode_s", operation):
            self.take(rows, codec, differences, values)
        self.note()

    def encode(self, message: Tensor, codec: Codec, seed: int, packet: Tensor) -> None:
        """Fill the packet of this rank's piece of an update."""
        counter = self.layout.first_counter + self.layout.shard_start(self.comm.rank)
        codec.encode(message, seed=seed, counter=counter, out=packet)

    def exchange(self, link: Link, packet: Tensor, codec: Codec) -> Rounds[list[Tensor]]:
        """The packets of an update by row of the compute weights and block, in the job's scratch memory."""
        levels, operation, device = self.layout.levels, self.layout.update, self.live.device
        # Packets of a row, by block.
        rows = [packet[None]]
        if levels.num_blocks > 1:
            column = link.subgroup(levels.column(link.rank))
            gathered = yield from all_gather_packets(column, packet, operation, codec.length)
            rows = [gathered.transpose(0, 1).reshape(levels.num_blocks, packet.numel())]
        if levels.num_rows > 1:
            stack = link.subgroup(levels.stack(link.rank))
            # Scratch of the same name is about to be filled again.
            slices = link.scratch("slices", *rows[0].shape, device=device).copy_(rows[0])
            # A message of several packets can't be cut to the length of one.
            length = codec.length if levels.num_blocks == 1 else Tensor.numel
            gathered = yield from all_gather_packets(stack, slices.view(-1), operation, length)
            grid = stack.topology
            rows = [gathered[grid.local_rank(r), grid.node(r)].view_as(slices) for r in range(levels.num_rows)]
        return list(rows)

    def take(self, rows: Sequence[Tensor], codec: Codec, differences: bool, values: Tensor | None) -> None:
        """Add decoded differences to the compute weights, in fp32, or replace these by decoded weights.

        Args:
            rows: see `exchange`.
            values: memory for a decoded packet, fp32; None: a kernel takes a numpy view of the weights themselves,
                which can pin their memory.
        """
        levels, n = self.layout.levels, self.layout.shard_numel
        for row, packets in zip(self.shard.view(levels.num_rows, levels.num_blocks, n), rows, strict=True):
            if values is None:
                codec.decode_all(packets.unbind(), row.unbind(), add=differences)
                continue
            for packet, piece in zip(packets, row, strict=True):
                codec.decode(packet, n, out=values)
                piece.copy_(values.add_(piece) if differences else values)


@dataclass(eq=False)
class LiveUnit:
    """The buckets of a unit, and their progress in the current step.

    ready: parameters whose gradient is complete. num_sent: number of reductions so far. is_sent: the step's last
    reduction has begun.
    """

    unit: Unit
    buckets: Sequence[FlatBucket]
    ready: set[str] = field(default_factory=set)
    num_sent: int = 0
    is_sent: bool = False

    @property
    def slots(self) -> list[Slot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]
