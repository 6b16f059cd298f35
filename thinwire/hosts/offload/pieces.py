"""Masters and state of an optimizer that looks across matrices, on a disk, one piece at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, Piece, Snapshot, Source
from thinwire.codecs.random import derive_seed, named_seed
from thinwire.hosts.offload.states import twin_of
from thinwire.hosts.offload.window import PagesOnDisk
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.owned import Owned, slots_of, state_of_piece
from thinwire.hosts.sharded.weights import Weights
from thinwire.methods.memory import Residency
from thinwire.methods.memory.residency import AT_ONCE, FP32_BYTES
from thinwire.methods.memory.setup import numbers_of, paged_bytes, piece_bytes
from thinwire.optim import Part, Shards, SummingOptimizer
from thinwire.state.elementwise import elementwise_kinds, state_kinds
from thinwire.state.portable import Held, add_optimizer, is_lost, records_of, report_optimizer, rescale, state_for
from thinwire.tiers import ChunkedFile, DiskFile, Pace, TierMeter
from thinwire.tiers.pool import aligned


@dataclass(eq=False)
class PieceSpot:
    """Where a piece and its state lie.

    Attributes:
        stored: what is on the disk, each tensor with its place and checksums.
        memory_bytes: with its state, of what is not read in pages.
        paged_bytes: at the end of its place, of what is read in pages.
        packet: what the piece is stored as; None: it is stored as it is.
        num_rounded: how often it was rounded.
    """

    owned: Owned
    place: int
    num_bytes: int
    memory_bytes: int = 0
    paged_bytes: int = 0
    stays: bool = False
    is_here: bool = True
    packet: Tensor | None = None
    num_rounded: int = 0
    stored: list[tuple[Tensor, int, list[int]]] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory between two uses of a piece that stays there."""
        plain = 0 if self.packet is None else aligned(self.owned.master.nbytes)
        return self.num_bytes - self.paged_bytes - plain


class PiecesOnDisk:
    """This rank's pieces of the masters, with the optimizer's state for each, on a disk.

    The optimizer brings a piece whenever a part of its update needs it, see `SummingOptimizer.step`. While it uses one,
    the piece that came next in the last step is read and the one before is written; under a budget, if all of them take
    no more than the largest piece alone. What it has not changed is not written again. Updated masters lie in the
    `shard_grad` of their bucket until the next reduction.

    Masters may be stored in a codec. Then a step rounds each piece to what is stored of it, at random by its name, its
    elements' numbers and how often it was rounded; its fp32 numbers have memory only while they are used, and a place
    on the disk for a checkpoint.

    Attributes:
        paged: holds what the optimizer reads in pages; None: there is no such state.

    parts: see Part, by parameter; of those that are cut and looked across.

    Raises ConfigError if the disk has not enough space.
    """

    def __init__(
        self, residency: Residency, inner: SummingOptimizer, weights: Weights, meter: TierMeter, pace: Pace,
        parts: Mapping[str, Part],
    ) -> None:  # fmt: skip
        self.inner, self.units, self.meter = inner, weights.units, meter
        self._at_once = residency.gradients == AT_ONCE
        self._buckets = [bucket for unit in self.units for bucket in unit.buckets]
        grouped, kinds = slots_of(inner, self._buckets), elementwise_kinds(inner)
        slots = [slot for group in grouped for slot in group if slot.owned.start < slot.owned.stop]
        self._coding = residency.master_coding
        sizes = [self._piece_bytes(slot, parts.get(slot.name)) for slot in slots]
        self.file = DiskFile(residency.folder, sum(sizes), meter, pace)
        self._inwards, self._outwards = ChunkedFile(self.file), ChunkedFile(self.file)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        self._coming: tuple[PieceSpot, Future[None]] | None = None
        self._leaving: dict[PieceSpot, Future[None]] = {}
        # The pieces of the last step in the order of their uses, and of this one; None: no step is under way.
        self._trace: list[PieceSpot] = []
        self._used: list[PieceSpot] | None = None
        self.spots: dict[Tensor, PieceSpot] = {}
        place = 0
        for group, own in zip(inner.param_groups, grouped, strict=True):
            group["params"] = []
            for slot in own:
                held = inner.state.pop(slot.param, None)
                if slot not in slots:
                    continue
                piece = weights.own(slot.bucket)[slot.owned].float().clone()
                num_bytes = sizes[len(self.spots)]
                part = parts.get(slot.name)
                numbers = numbers_of(inner, piece.numel(), part) - (0 if part is None else inner.num_paged(part))
                coded = num_bytes - piece_bytes(inner, piece.numel(), part)
                spot = PieceSpot(Owned(slot, piece), place, num_bytes, FP32_BYTES * numbers + coded)
                self.spots[piece], spot.paged_bytes = spot, paged_bytes(inner, part)
                place += num_bytes
                group["params"].append(piece)
                if not self._coding.is_plain:
                    spot.packet = torch.empty(self._coding.num_bytes(piece.numel()), dtype=torch.uint8)
                    self._round(spot)
                if held:
                    # It is cut further when the pieces are joined.
                    inner.state[piece] = state_of_piece(held, slot, kinds)
                else:
                    self._put_away(spot)
        self.paged: PagesOnDisk | None = None
        if inner.paged_kind is not None:
            places = {p: spot.place + spot.num_bytes - spot.paged_bytes for p, spot in self.spots.items()}
            largest = max((spot.paged_bytes for spot in self.spots.values()), default=0)
            self.paged = PagesOnDisk(self.file, meter, places, min(inner.page_bytes, largest))
        largest = max((spot.memory_bytes for spot in self.spots.values()), default=0)
        self._most_bytes: float = largest if residency.memory is not None else float("inf")
        for bucket in self._buckets:
            bucket.away = self

    @property
    def owned(self) -> list[Owned]:
        """See StatesInMemory."""
        return [spot.owned for spot in self.spots.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(spot.num_bytes for spot in self.spots.values())

    def _piece_bytes(self, slot: Slot, part: Part | None) -> int:
        numel = slot.owned.stop - slot.owned.start
        coded = 0 if self._coding.is_plain else aligned(self._coding.num_bytes(numel))
        return piece_bytes(self.inner, numel, part) + coded

    @contextmanager
    def bring(self, piece: Tensor, is_last: bool = False) -> Iterator[None]:
        """Context with a piece and its state in memory, where they may be changed. is_last: its step ends with it."""
        spot = self.spots[piece]
        with self.meter.waiting():
            self._bring(spot)
        self._read_ahead(spot)
        yield
        if is_last and piece.grad is not None:
            self._round(spot)
        if is_last and not self._at_once:
            spot.owned.grad.copy_(piece)
        if not spot.stays:
            with self.meter.waiting():
                self._put_away(spot)
        elif spot.packet is not None:
            piece.untyped_storage().resize_(0)

    def _round(self, spot: PieceSpot) -> None:
        """Make a piece what is stored of it."""
        if spot.packet is None:
            return
        spot.num_rounded += 1
        seed = derive_seed(named_seed(0, f"master/{spot.owned.slot.name}"), spot.num_rounded)
        self._coding.encode(spot.owned.master, spot.packet, seed=seed, counter=spot.owned.held.offset)
        self._coding.decode(spot.packet, spot.owned.master)

    def stay(self, num_bytes: int) -> None:
        """Let pieces stay in memory, each from its next use on, as many as fit into so many bytes.

        What is read in pages comes first: a step reads it more often.
        """
        num_bytes -= 0 if self.paged is None else self.paged.stay(num_bytes)
        for spot in self.spots.values():
            if spot.held_bytes <= num_bytes and not spot.stays:
                spot.stays = True
                num_bytes -= spot.held_bytes

    def step(self, used: Collection[str]) -> Iterator[Any]:
        """See States."""
        stepped = {spot.owned.master for spot in self.spots.values() if spot.owned.slot.name in used}
        for piece, spot in self.spots.items():
            piece.grad = spot.owned.grad if piece in stepped else None
        self._used = []
        self.inner.step()
        self._trace, self._used = self._used, None
        for bucket in self._buckets:
            self._clear_padding(bucket)
        for piece in self.spots:
            piece.grad = None
            if piece not in stepped:
                with self.bring(piece, is_last=True):
                    pass
        yield from self.units

    def step_bucket(self, bucket: FlatBucket, used: Collection[str]) -> None:
        """See BucketStates."""
        own = [spot.owned for spot in self._of(bucket) if spot.owned.slot.name in used]
        for owned in own:
            owned.master.grad = owned.grad
        self.inner.step()
        for owned in own:
            owned.master.grad = None

    def ready(self) -> Iterator[LiveUnit]:
        """See BucketStates."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.hold_gradients()
                bucket.shard_grad.copy_(self.masters(bucket))
            yield unit

    def _clear_padding(self, bucket: FlatBucket) -> None:
        """Zero the elements of `shard_grad` that belong to no piece, as those of masters are."""
        at = 0
        for slot in sorted((s.owned.slot for s in self._of(bucket)), key=lambda slot: slot.owned.start):
            bucket.shard_grad[at : slot.owned.start] = 0
            at = slot.owned.stop
        bucket.shard_grad[at:] = 0

    def _of(self, bucket: FlatBucket) -> list[PieceSpot]:
        return [spot for spot in self.spots.values() if spot.owned.slot.bucket is bucket]

    def masters(self, bucket: FlatBucket) -> Tensor:
        """See Away."""
        found = torch.zeros(bucket.layout.shard_numel)
        for spot in self._of(bucket):
            with self.bring(spot.owned.master):
                found[spot.owned.slot.owned] = spot.owned.master
        return found

    def set_masters(self, bucket: FlatBucket, values: Tensor, first: int) -> None:
        """See Away."""
        for spot in self._of(bucket):
            own = spot.owned.slot.owned
            low, high = max(first, own.start), min(first + len(values), own.stop)
            if low < high:
                with self.bring(spot.owned.master):
                    spot.owned.master[low - own.start : high - own.start] = values[low - first : high - first]
                    self._round(spot)

    def sent(self, bucket: FlatBucket) -> None:
        """See Away. Unless all is stepped at once, the memory stays for the next gradients."""
        if self._at_once:
            bucket.shard_grad.untyped_storage().resize_(0)

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """See States. The pieces are saved from the disk, while training waits."""
        shadow, held = twin_of(self.inner), dict[str, Held]()
        assert isinstance(shadow, SummingOptimizer) and self.inner.shards is not None
        parts, seen = dict[Tensor, Part](), dict[Tensor, Tensor]()
        self._settle()
        if self.paged is not None:
            self.paged.flush()
        for piece, spot in self.spots.items():
            if spot.is_here:
                self._write(spot, self._tensors(spot))
            mapped = {tensor: self._mapped(tensor, place) for tensor, place, _ in spot.stored}
            self._write_plain(spot)
            seen[piece], state = self._mapped(piece, spot.place), self.inner.state.get(piece, {})
            if state:
                shadow.state[seen[piece]] = {
                    kind: mapped.get(value, value) if isinstance(value, Tensor) else value
                    for kind, value in state.items()
                }
            if piece in self.inner.shards.parts:
                parts[seen[piece]] = self.inner.shards.parts[piece]
            held[spot.owned.slot.name] = replace(spot.owned.held, tensor=seen[piece])
        shadow.shards = Shards(parts)
        shadow.param_groups = [
            {**group, "params": [seen[piece] for piece in group["params"]]} for group in self.inner.param_groups
        ]
        snapshot.in_place = True
        return add_optimizer(snapshot, shadow, held)

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """See States."""
        kinds_of = state_kinds(self.inner, list(self.spots))
        groups = {piece: group for group in self.inner.param_groups for piece in group["params"]}
        self._settle()
        self.inner.state.clear()
        rescaled, fresh = set[str](), 0
        for (piece, spot), kinds in zip(self.spots.items(), kinds_of, strict=True):
            name, mine = spot.owned.slot.name, spot.owned.held
            spot.stored = spot.stored[:1]
            with self.bring(piece):
                pieces: dict[str, Piece] = {f"{WEIGHTS}/{name}": mine.piece()}
                records = records_of(self.inner, mine)
                into = {}
                if (kind := self.inner.paged_kind) in records and self.paged is not None:
                    into[kind] = self.paged.made(piece, records[kind].shape)
                state = state_for(source, kinds, name, mine, pieces, into=into, records=records)
                self._read_paged(source, pieces, into)
                source.read(pieces)
                self._round(spot)
                if state:
                    self.inner.state[piece] = state
                fresh += not state and is_lost(source, kinds, name)
                rescaled.update(rescale(source, name, state, groups[piece]))
        report_optimizer(source, {kind for kinds in kinds_of for kind in kinds}, fresh, len(self.spots), rescaled)

    def _read_paged(self, source: Source, pieces: dict[str, Piece], into: Mapping[str, Tensor]) -> None:
        """Read what is read in pages. into: by kind. pieces: it is taken out of them."""
        for values in into.values():
            for key in [key for key, piece in pieces.items() if piece.values.data_ptr() == values.data_ptr()]:
                piece = pieces.pop(key)
                for rows, page in self.inner.pages(values, changes=True):
                    offset = piece.offset + rows.start * page.shape[1]
                    source.read({key: replace(piece, offset=offset, values=page.view(-1))})

    def close(self) -> None:
        """Free the disk space."""
        self._reader.shutdown()
        self._writer.shutdown()
        if self.paged is not None:
            self.paged.close()
        self.file.close()

    def _tensors(self, spot: PieceSpot) -> Sequence[Tensor]:
        """The master, or what it is stored as, and the state's tensors."""
        state = self.inner.state.get(spot.owned.master, {})
        stored = spot.owned.master if spot.packet is None else spot.packet
        own = (value for kind, value in state.items() if kind != self.inner.paged_kind)
        return [stored, *(value for value in own if isinstance(value, Tensor) and value.dim())]

    def _bring(self, spot: PieceSpot) -> None:
        if self._coming is not None and self._coming[0] is not spot:
            # The order has changed.
            self._end_reading()
        if not spot.is_here:
            while self._leaving and (spot in self._leaving or not self._fits(spot)):
                self._end_writing()
            if self._coming is None:
                self._begin_reading(spot)
            self._end_reading()
        master = spot.owned.master
        if spot.packet is not None and not master.untyped_storage().nbytes():
            master.untyped_storage().resize_(master.nbytes)
            self._coding.decode(spot.packet, master)

    def _fits(self, *more: PieceSpot) -> bool:
        """Whether these are in memory beside what is on its way without more bytes than may be."""
        while self._leaving and next(iter(self._leaving.values())).done():
            self._end_writing()
        moving = {*more, *self._leaving, *(self._coming or ())[:1]}
        return sum(spot.memory_bytes for spot in moving) <= self._most_bytes

    def _read_ahead(self, spot: PieceSpot) -> None:
        """Begin to read what came after this piece in the last step, if a step is under way and as the last one."""
        if self._used is None:
            return
        self._used.append(spot)
        at = len(self._used)
        if self._trace[at - 1 : at] != [spot] or at == len(self._trace):
            return
        after = self._trace[at]
        if not (after.is_here or after is spot or after in self._leaving) and self._fits(spot, after):
            self._begin_reading(after)

    def _begin_reading(self, spot: PieceSpot) -> None:
        for tensor, _, _ in spot.stored:
            tensor.untyped_storage().resize_(tensor.nbytes)
        self._coming = spot, self._reader.submit(self._read, spot)

    def _end_reading(self) -> None:
        if self._coming is not None:
            (spot, coming), self._coming = self._coming, None
            coming.result()
            spot.is_here = True

    def _read(self, spot: PieceSpot) -> None:
        for tensor, place, sums in spot.stored:
            self._inwards.read(place, tensor, sums, f"{spot.owned.slot.name!r} is")

    def _put_away(self, spot: PieceSpot) -> None:
        while self._leaving:
            self._end_writing()
        spot.is_here = False
        self._leaving[spot] = self._writer.submit(self._leave, spot, self._tensors(spot))

    def _end_writing(self) -> None:
        spot = next(iter(self._leaving))
        self._leaving.pop(spot).result()

    def _settle(self) -> None:
        """Wait for what is read and written. Pieces that were read ahead stay in memory until their next use."""
        self._end_reading()
        while self._leaving:
            self._end_writing()

    def _leave(self, spot: PieceSpot, tensors: Sequence[Tensor]) -> None:
        self._write(spot, tensors)
        for tensor in (spot.owned.master, *tensors):
            tensor.untyped_storage().resize_(0)

    def _write(self, spot: PieceSpot, tensors: Sequence[Tensor]) -> None:
        """Write what has changed of a piece that is in memory."""
        before = {(tensor, place): sums for tensor, place, sums in spot.stored}
        at, spot.stored = spot.place, []
        if spot.packet is not None:
            # The fp32 numbers of a checkpoint lie in front.
            at += aligned(spot.owned.master.nbytes)
        for tensor in tensors:
            sums = self._outwards.write(at, tensor, before.get((tensor, at), []))
            spot.stored.append((tensor, at, sums))
            at += aligned(tensor.nbytes)
        assert at <= spot.place + spot.num_bytes - spot.paged_bytes

    def _write_plain(self, spot: PieceSpot) -> None:
        """Write the fp32 numbers of a piece that is stored in a codec, for a checkpoint."""
        if spot.packet is not None:
            with self.bring(spot.owned.master):
                self._outwards.write(spot.place, spot.owned.master)
            self._settle()

    def _mapped(self, tensor: Tensor, place: int) -> Tensor:
        """A stored tensor as a view of the file."""
        if not tensor.numel():
            return tensor
        return self.file.mapped(place, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
