"""Where weights, gradient sums and masters lie under three levels, and the jobs that move them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, derive_seed
from thinwire.collectives import Communicator
from thinwire.collectives.gather import all_gather_packets, gather_bytes
from thinwire.collectives.link import Link
from thinwire.collectives.reduce import reduce_bytes, reduce_scatter
from thinwire.collectives.rounds import Rounds
from thinwire.layout.buckets import Bucket, Slot, build_buckets
from thinwire.layout.formats import LevelFormat, Strategy
from thinwire.layout.layers import layers_of
from thinwire.layout.levels import Levels


@dataclass(eq=False)
class Part(Bucket):
    """The matrices of a unit, or its norms and biases: `numel` elements in a flat tensor.

    live: the whole weights; its memory is there only while they are needed, unless s1 is 1. shard: fp32 [numel / s1],
    the compute weights that stay, a row for each slice of the stack. sums: fp32 [numel / s2], the gradients of this
    step's micro-batches over the block. master, shard_grad: fp32 [numel / P], as in Bucket.
    """

    wire: LevelFormat
    levels: Levels = field(kw_only=True)
    shard: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    # Of the parameters, when their weights were last this optimizer's own.
    versions: list[int] = field(default_factory=list)

    @property
    def shard_start(self) -> int:
        return self.levels.piece(self.comm.rank) * self.shard_numel

    @property
    def row_numel(self) -> int:
        return self.numel // self.levels.gradients_over

    @property
    def own(self) -> Tensor:
        """The part of `shard` whose masters this rank owns."""
        levels, rank = self.levels, self.comm.rank
        row = rank % levels.gradients_over // levels.weights_over
        start = row * self.row_numel + rank // levels.gradients_over * self.shard_numel
        return self.shard[start : start + self.shard_numel]

    def allocate(self) -> None:
        """Move the parameters into `live`, and cut from it what this rank keeps."""
        super().allocate()
        levels, column = self.levels, self.comm.rank % self.levels.weights_over
        self.shard = self.live
        if levels.weights_over > 1:
            self.shard = self.live.view(levels.num_rows, levels.weights_over, -1)[:, column].reshape(-1).clone()
        self.sums = self.shard_grad if levels.num_blocks == 1 else torch.zeros(self.row_numel, device=self.live.device)
        self.note_versions()

    def set_whole(self, is_whole: bool) -> None:
        """Give `live` its memory, with undefined content, or take it away; the parameters stay views into it."""
        try:
            self.live.untyped_storage().resize_(self.live.nbytes if is_whole else 0)
        except RuntimeError as error:
            raise RuntimeError(
                f"the memory of weights between {self.slots[0].name!r} and {self.slots[-1].name!r} can't be freed: "
                "numpy holds it; clone weights before you give them to numpy"
            ) from error

    def note_versions(self) -> None:
        self.versions = [slot.param._version for slot in self.slots]

    def edited(self) -> list[Slot]:
        """The parameters that were changed in place by somebody else."""
        return [s for s, seen in zip(self.slots, self.versions, strict=True) if s.param._version != seen]

    def adopt(self, slot: Slot) -> None:
        """Take a parameter's whole weights as this rank's compute weights and masters."""
        levels, n = self.levels, self.row_numel
        for row in range(levels.num_rows):
            start = (row * levels.weights_over + self.comm.rank % levels.weights_over) * n
            first, last = max(slot.start, start), min(slot.end, start + n)
            if first < last:
                self.shard[row * n + first - start : row * n + last - start] = self.live[first:last]
        start, end = self.shard_range(slot)
        self.master[start:end] = self.live[self.shard_start + start : self.shard_start + end]

    # ---------------------------------------------------------------- jobs

    def gather(self, link: Link) -> Rounds[None]:
        """live = C(shard) of the s1 neighbours, the own one included, so that all compute with the same weights."""
        levels, codec, n = self.levels, self.wire.shards, self.row_numel
        group = link.among(levels.neighbours(link.rank), levels.inside)
        packets = link.scratch("shards", levels.num_rows, codec.packet_bytes(n))
        with link.timed("encode_s", "weights"):
            for row, packet in zip(self.shard.view(levels.num_rows, n), packets, strict=True):
                codec.encode(row, out=packet)
        gathered = yield from all_gather_packets(group, packets.view(-1), "weights")
        whole, grid = self.live.view(levels.num_rows, levels.weights_over, n), group.topology
        # Not straight into `live`: a kernel's view of it, which is numpy's, would pin its memory.
        values = link.scratch("decoded", n, dtype=torch.float32)
        with link.timed("decode_s", "weights"):
            for rank in range(grid.world_size):
                theirs = gathered[grid.local_rank(rank), grid.node(rank)].view_as(packets)
                for row, packet in enumerate(theirs):
                    whole[row, rank].copy_(codec.decode(packet, n, out=values))

    def reduce(self, link: Link, grads: list[Tensor | None], *, seed: int, first: bool, last: bool) -> Rounds[None]:
        """sums += the block's sum of this rank's slice of `grads`; after the last, shard_grad = mean over all ranks."""
        levels, wire = self.levels, self.wire
        flat = self.flat_gradient(link, grads)
        grads.clear()
        block = link.among(levels.block(link.rank))
        total = yield from reduce_scatter(
            block, flat, wire.intra, wire.inter, seed=derive_seed(seed, link.rank // levels.gradients_over),
            counter=self.first_counter, operation="gradients",
        )  # fmt: skip
        self.sums.copy_(total) if first else self.sums.add_(total)
        if not last:
            return
        counter = self.first_counter + link.rank % levels.gradients_over * self.row_numel
        column = link.among(levels.column(link.rank))
        total = yield from reduce_scatter(
            column, self.sums, wire.intra, wire.inter, seed=derive_seed(seed, levels.num_blocks), counter=counter,
            operation="gradient sums",
        )  # fmt: skip
        torch.mul(total, 1.0 / link.topology.world_size, out=self.shard_grad)

    def refresh(self, link: Link, message: Tensor, codec: Codec, *, differences: bool, seed: int) -> Rounds[None]:
        """shard = C(message), or shard += C(message - shard), of all owners of a piece of it.

        A packet crosses between blocks once, then spreads in the stack; all copies of a shard decode the same packets.
        """
        levels, n = self.levels, self.shard_numel
        if levels.num_blocks * levels.num_rows == 1:
            self.shard.copy_(message)
            return
        with link.timed("encode_s", "refresh"):
            if differences:
                message = torch.sub(message, self.own, out=link.scratch("difference", n, dtype=torch.float32))
            packet = link.scratch("refresh", codec.packet_bytes(n))
            codec.encode(message, seed=seed, counter=self.first_counter + self.shard_start, out=packet)
        gathered = yield from all_gather_packets(link.among(levels.column(link.rank)), packet, "refresh")
        slices = link.scratch("slices", levels.num_blocks, packet.numel())
        slices.copy_(gathered.transpose(0, 1).reshape(slices.shape))
        stack = link.among(levels.stack(link.rank))
        gathered = yield from all_gather_packets(stack, slices.view(-1), "refresh")
        pieces, grid = self.shard.view(levels.num_rows, levels.num_blocks, n), stack.topology
        with link.timed("decode_s", "refresh"):
            for row in range(levels.num_rows):
                packets = gathered[grid.local_rank(row), grid.node(row)].view_as(slices)
                for piece, packet in zip(pieces[row], packets, strict=True):
                    codec.decode_add(packet, piece) if differences else codec.decode(packet, n, out=piece)

    # ---------------------------------------------------------------- costs

    def sent_bytes_by(self, num_gathers: int, micro_batches: int) -> Iterator[tuple[str, str, int]]:
        """(operation, level, payload) of what this rank sends in a step."""
        levels, wire, grid = self.levels, self.wire, self.levels.topology
        shards = gather_bytes(
            grid.among(levels.neighbours(0)), levels.num_rows * wire.shards.packet_bytes(self.row_numel)
        )
        yield "weights", levels.inside, num_gathers * shards["intra"]
        yield "weights", "inter", num_gathers * shards["inter"]
        packet = wire.weights.packet_bytes(self.shard_numel)
        many = reduce_bytes(grid.among(levels.block(0)), self.row_numel, wire.intra, wire.inter)
        once = {
            "gradient sums": reduce_bytes(grid.among(levels.column(0)), self.shard_numel, wire.intra, wire.inter),
            "refresh": gather_bytes(grid.among(levels.column(0)), packet),
        }
        stack = gather_bytes(grid.among(levels.stack(0)), levels.num_blocks * packet)
        for level in ("intra", "inter"):
            yield "gradients", level, micro_batches * many[level]
            yield "gradient sums", level, once["gradient sums"][level]
            yield "refresh", level, once["refresh"][level] + stack[level]


@dataclass(eq=False)
class Unit:
    """Parameters whose weights are whole at the same time: a module's, or what is left, which is the root's.

    stays: whole from forward to backward; the root, which is needed at both ends, and the last module, whose backward
    follows its forward.
    """

    name: str
    module: nn.Module
    parts: list[Part]
    stays: bool
    # Weights: whole, or on their way; kept until the next backward, by request.
    is_whole: bool = True
    is_kept: bool = False
    gathering: list[Future] = field(default_factory=list)
    refreshing: list[Future] = field(default_factory=list)
    # Of the step under way.
    in_backward: bool = False
    ready: set[int] = field(default_factory=set)
    num_reduced: int = 0
    is_sent: bool = False

    @property
    def slots(self) -> list[Slot]:
        return [slot for part in self.parts for slot in part.slots]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)


def lay_out(
    model: nn.Module, trained: dict[str, nn.Parameter], strategy: Strategy, comm: Communicator, levels: Levels
) -> list[Unit]:
    """The units without memory: the root, then children of ModuleLists in order of registration.

    A parameter that two units share is the root's.
    """
    modules = layers_of(model)
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for param in module.parameters():
            users.setdefault(param, []).append(module)
    own: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {model: [], **{module: [] for module in modules}}
    for name, param in trained.items():
        used_by = users.get(param, [])
        own[used_by[0] if len(used_by) == 1 else model].append((name, param))
    make = partial(Part, levels=levels)
    units = [
        Unit(_name(named), module, build_buckets(named, strategy, lambda *_: comm, 1 << 62, make), stays=False)
        for module, named in own.items()
        if named
    ]
    for unit in units:
        unit.stays = unit.module is model or unit is units[-1]
    parts = [part for unit in units for part in unit.parts]
    for stream, part in enumerate(parts):
        part.stream = stream
    for index, slot in enumerate(slot for part in parts for slot in part.slots):
        slot.index = index
    return units


def sent_by(units: Iterable[Unit], micro_batches: int) -> dict[tuple[str, str], int]:
    """Payload of weights and gradients that a rank sends in one step, by operation and level."""
    sent: dict[tuple[str, str], int] = {}
    for unit in units:
        num_gathers = micro_batches * (1 if unit.stays else 2)
        for part in unit.parts:
            for operation, level, num_bytes in part.sent_bytes_by(num_gathers, micro_batches):
                sent[operation, level] = sent.get((operation, level), 0) + num_bytes
    return sent


def _name(named: list[tuple[str, nn.Parameter]]) -> str:
    return f"{named[0][0]} ... {named[-1][0]}" if len(named) > 1 else named[0][0]
