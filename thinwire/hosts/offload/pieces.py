"""Masters and state of an optimizer that looks across matrices, on a disk, one piece at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import WEIGHTS, Piece, Snapshot, Source
from thinwire.codecs.random import derive_seed, named_seed
from thinwire.errors import ThinwireError
from thinwire.hosts.offload.journal import SHELF, Journal
from thinwire.hosts.offload.moving import MovingPieces, PieceSpot, give_memory
from thinwire.hosts.offload.slots import SlottedFile, StoredTensor, hollow
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
from thinwire.state.portable import (
    Held,
    add_optimizer,
    check_marks,
    is_lost,
    records_of,
    report_optimizer,
    rescale,
    state_for,
)
from thinwire.tiers import Pace, TierMeter
from thinwire.tiers.pool import aligned


class PiecesOnDisk:
    """This rank's pieces of the masters, with the optimizer's state for each, on a disk.

    The optimizer brings a piece whenever a part of its update needs it, see `SummingOptimizer.step`. While it uses one,
    the piece that came next in the last step is read and the one before is written; under a budget, if all of them take
    no more than the largest piece alone. What it has not changed is not written again. Updated masters lie in the
    `shard_grad` of their bucket until the next reduction.

    Masters may be stored in a codec. Then a step rounds each piece to what is stored of it, at random by its name, its
    elements' numbers and how often it was rounded; its fp32 numbers have memory only while they are used, and a place
    on the disk for a checkpoint.

    With a journal, the file has a name and two slots. What is written goes to the slot that was not kept.

    Attributes:
        paged: holds what the optimizer reads in pages; None: there is no such state.

    parts: see Part, by parameter; of those that are cut and looked across. layout: see `layout_of`.

    Raises ConfigError if the disk has not enough space.
    """

    def __init__(
        self, residency: Residency, inner: SummingOptimizer, weights: Weights, meter: TierMeter, pace: Pace,
        parts: Mapping[str, Part], journal: Journal | None, layout: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.inner, self.units, self.meter, self._parts = inner, weights.units, meter, parts
        self._at_once = residency.gradients == AT_ONCE
        self._buckets = [bucket for unit in self.units for bucket in unit.buckets]
        grouped, kinds = slots_of(inner, self._buckets), elementwise_kinds(inner)
        slots = [slot for group in grouped for slot in group if slot.owned.start < slot.owned.stop]
        self._coding = residency.master_coding
        sizes = {slot: self._piece_bytes(slot, parts.get(slot.name)) for slot in slots}
        folder, name = (residency.folder, "") if journal is None else (journal.folder, "pieces")
        self.slots = SlottedFile(folder, sum(sizes.values()), meter, pace, name)
        self.moving = MovingPieces(self.slots, self._tensors)
        self.spots: dict[Tensor, PieceSpot] = {}
        before: dict[Slot, dict[str, Any]] = {}
        place = 0
        for group, own in zip(inner.param_groups, grouped, strict=True):
            group["params"] = []
            for slot in own:
                if held := inner.state.pop(slot.param, None):
                    before[slot] = state_of_piece(held, slot, kinds)
                if slot in sizes:
                    spot = self._spot(slot, place, sizes[slot])
                    self.spots[spot.owned.master] = spot
                    group["params"].append(spot.owned.master)
                    place += spot.num_bytes
        self.paged: PagesOnDisk | None = None
        if inner.paged_kind is not None:
            places = {p: spot.place + spot.num_bytes - spot.paged_bytes for p, spot in self.spots.items()}
            largest = max((spot.paged_bytes for spot in self.spots.values()), default=0)
            self.paged = PagesOnDisk(self.slots, meter, places, min(inner.page_bytes, largest))
        # Before a step writes over what was kept.
        self._before_change: Callable[[], None] = lambda: None
        if journal is not None:
            self._before_change = journal.forget_older
        if journal is None or journal.find(self, layout) is None:
            self._fill(weights, before)
        largest = max((spot.memory_bytes for spot in self.spots.values()), default=0)
        self.moving.most_bytes = largest if residency.memory is not None else math.inf
        for bucket in self._buckets:
            bucket.away = self

    def _spot(self, slot: Slot, place: int, num_bytes: int) -> PieceSpot:
        """A piece without memory."""
        piece, part = hollow(torch.Size([slot.owned.stop - slot.owned.start])), self._parts.get(slot.name)
        numbers = numbers_of(self.inner, piece.numel(), part)
        numbers -= 0 if part is None else self.inner.num_paged(part)
        coded = num_bytes - piece_bytes(self.inner, piece.numel(), part)
        spot = PieceSpot(Owned(slot, piece), place, num_bytes, FP32_BYTES * numbers + coded)
        spot.paged_bytes = paged_bytes(self.inner, part)
        if not self._coding.is_plain:
            spot.packet = hollow(torch.Size([self._coding.num_bytes(piece.numel())]), torch.uint8)
        return spot

    def _fill(self, weights: Weights, before: Mapping[Slot, dict[str, Any]]) -> None:
        """Take the first masters, and the optimizer's present state."""
        self._before_change()
        for piece, spot in self.spots.items():
            slot = spot.owned.slot
            give_memory([piece] if spot.packet is None else [piece, spot.packet])
            piece.copy_(weights.own(slot.bucket)[slot.owned])
            spot.is_here = True
            self._round(spot)
            if slot in before:
                # It is cut further when the pieces are joined.
                self.inner.state[piece] = before[slot]
            else:
                self.moving.put_away(spot)

    @property
    def shape(self) -> dict[str, Any]:
        """What must be the same for a file of an earlier process to be read."""
        records = {
            name: [[kind, *record.shape] for kind, record in self.inner.records_of(part).items()]
            for name, part in self._parts.items()
        }
        sizes = {spot.owned.slot.name: [spot.place, spot.num_bytes] for spot in self.spots.values()}
        return {"pieces": sizes, "masters": str(self._coding), "state": records, "page": self.inner.page_bytes}

    def keep(self) -> dict[str, Any]:
        """Wait until all of it is on the disk. Return the numbers from which another process goes on."""
        self.moving.settle()
        for spot in self.spots.values():
            if spot.is_here:
                self.moving.write(spot)
        pages = [] if self.paged is None else self.paged.keep()
        self.slots.file.sync()
        for spot in self.spots.values():
            spot.kept = {each.place: each.slot for each in spot.stored}
        kept = {spot.owned.slot.name: self._kept(spot) for spot in self.spots.values()}
        return {SHELF: self.shape | {"kept": kept, "pages": pages}}

    def _kept(self, spot: PieceSpot) -> dict[str, Any]:
        """The numbers of a piece that is on the disk; in place of a tensor None, in order of `stored`."""
        state = self.inner.state.get(spot.owned.master, {})
        return {
            "rounded": spot.num_rounded,
            "stored": [(list(each.tensor.shape), each.place, each.slot, each.sums[each.slot]) for each in spot.stored],
            "state": {kind: None if isinstance(value, Tensor) else value for kind, value in state.items()},
        }

    def begin_anew(self) -> None:
        """Forget what is on the disk. Nothing is kept."""
        for piece, spot in self.spots.items():
            spot.stored, spot.kept, spot.num_rounded = [], {}, 0
            self.inner.state.pop(piece, None)
        if self.paged is not None:
            self.paged.begin_anew()

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `keep` returned in another process.

        Raises ThinwireError if it has another shape, or if the file no longer holds it.
        """
        if other := [key for key, value in self.shape.items() if kept[key] != value]:
            raise ThinwireError(f"it holds other {other[0]} than this run")
        self.begin_anew()
        for piece, spot in self.spots.items():
            found = kept["kept"][spot.owned.slot.name]
            spot.num_rounded, stored = found["rounded"], iter(found["stored"])
            self._expect(spot, piece if spot.packet is None else spot.packet, next(stored))
            for kind, number in found["state"].items():
                if number is None and kind == self.inner.paged_kind and self.paged is not None:
                    shape = self.inner.records_of(self._parts[spot.owned.slot.name])[kind].shape
                    number = self.paged.made(piece, shape)
                elif number is None:
                    each = next(stored)
                    number = self._expect(spot, hollow(torch.Size(each[0])), each)
                self.inner.state[piece][kind] = number
            self.moving.check(spot)
        if self.paged is not None:
            self.paged.go_on(kept["pages"])

    def _expect(self, spot: PieceSpot, tensor: Tensor, told: Sequence[Any]) -> Tensor:
        """Note that the disk holds a tensor. told: see `_kept`."""
        _, place, slot, sums = told
        stored = StoredTensor(tensor, place, slot)
        stored.sums[slot], spot.kept[place] = sums, slot
        spot.stored.append(stored)
        return tensor

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
            self.moving.bring(spot)
        if spot.packet is not None and not piece.untyped_storage().nbytes():
            give_memory([piece])
            self._coding.decode(spot.packet, piece)
        self.moving.read_ahead(spot)
        yield
        if is_last and piece.grad is not None:
            self._round(spot)
        if is_last and not self._at_once:
            spot.owned.grad.copy_(piece)
        if not spot.stays:
            with self.meter.waiting():
                self.moving.put_away(spot)
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
        self._before_change()
        stepped = {spot.owned.master for spot in self.spots.values() if spot.owned.slot.name in used}
        for piece, spot in self.spots.items():
            piece.grad = spot.owned.grad if piece in stepped else None
        with self.moving.in_order():
            self.inner.step()
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
        self._before_change()
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
        self._before_change()
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
        self.moving.settle()
        if self.paged is not None:
            self.paged.flush()
        for piece, spot in self.spots.items():
            if spot.is_here:
                self.moving.write(spot)
            mapped = {each.tensor: self.slots.mapped(each.tensor, each.place, each.slot) for each in spot.stored}
            self._write_plain(spot)
            seen[piece] = self.slots.mapped(piece, spot.place) if spot.packet is not None else mapped[piece]
            state = self.inner.state.get(piece, {})
            if (kind := self.inner.paged_kind) in state and self.paged is not None:
                mapped[state[kind]] = self.paged.mapped(state[kind])
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
        self.moving.settle()
        self._before_change()
        self.inner.state.clear()
        rescaled, fresh = set[str](), 0
        for (piece, spot), kinds in zip(self.spots.items(), kinds_of, strict=True):
            name, mine = spot.owned.slot.name, spot.owned.held
            check_marks(source, self.inner, name, mine)
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
        self.moving.close()
        if self.paged is not None:
            self.paged.close()
        self.slots.file.close()

    def _tensors(self, spot: PieceSpot) -> Sequence[Tensor]:
        """The master, or what it is stored as, and the state's tensors."""
        state = self.inner.state.get(spot.owned.master, {})
        stored = spot.owned.master if spot.packet is None else spot.packet
        own = (value for kind, value in state.items() if kind != self.inner.paged_kind)
        return [stored, *(value for value in own if isinstance(value, Tensor) and value.dim())]

    def _write_plain(self, spot: PieceSpot) -> None:
        """Write the fp32 numbers of a piece that is stored in a codec, for a checkpoint."""
        if spot.packet is not None:
            with self.bring(spot.owned.master):
                self.slots.write_plain(spot.place, spot.owned.master)
            self.moving.settle()
