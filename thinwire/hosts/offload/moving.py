"""Moves pieces of tensors between memory and a disk, some of them ahead of their use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.hosts.offload.slots import SlottedFile, StoredTensor
from thinwire.hosts.sharded.owned import Owned
from thinwire.tiers.pool import aligned


@dataclass(eq=False)
class PieceSpot:
    """Where a piece and its state lie.

    Attributes:
        stored: what is on the disk. kept: the slots of what was last kept, by place.
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
    is_here: bool = False
    packet: Tensor | None = None
    num_rounded: int = 0
    stored: list[StoredTensor] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes in memory between two uses of a piece that stays there."""
        plain = 0 if self.packet is None else aligned(self.owned.master.nbytes)
        return self.num_bytes - self.paged_bytes - plain


class MovingPieces:
    """Brings pieces into memory, and writes them when they leave it.

    tensors_of: the tensors of a piece that lie on the disk.

    Attributes:
        most_bytes: the most of pieces that are in use or on their way, unless one alone takes more.
    """

    def __init__(self, slots: SlottedFile, tensors_of: Callable[[PieceSpot], Sequence[Tensor]]) -> None:
        self.slots, self._tensors_of, self.most_bytes = slots, tensors_of, math.inf
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        self._coming: tuple[PieceSpot, Future[None]] | None = None
        self._leaving: dict[PieceSpot, Future[None]] = {}
        # The pieces of the last step in the order of their uses, and of this one; None: no step is under way.
        self._trace: list[PieceSpot] = []
        self._used: list[PieceSpot] | None = None

    @property
    def under_way(self) -> set[PieceSpot]:
        """The pieces that are read or written."""
        return {*self._leaving, *(self._coming or ())[:1]}

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Context with the uses of a step: those of the next one come in the same order."""
        self._used = []
        yield
        self._trace, self._used = self._used, None

    def bring(self, spot: PieceSpot) -> None:
        """Wait until a piece is in memory."""
        if self._coming is not None and self._coming[0] is not spot:
            # The order has changed.
            self._end_reading()
        if not spot.is_here:
            while self._leaving and (spot in self._leaving or not self._fits(spot)):
                self._end_writing()
            if self._coming is None:
                self._begin_reading(spot)
            self._end_reading()

    def put_away(self, spot: PieceSpot) -> None:
        """Begin to write what has changed of a piece that is in memory, and free its memory then."""
        while self._leaving:
            self._end_writing()
        spot.is_here = False
        self._leaving[spot] = self._writer.submit(self._leave, spot, self._tensors_of(spot))

    def settle(self) -> None:
        """Wait for what is read and written. Pieces that were read ahead stay in memory until their next use."""
        self._end_reading()
        while self._leaving:
            self._end_writing()

    def write(self, spot: PieceSpot) -> None:
        """Write what has changed of a piece that stays in memory. Call `settle` first."""
        self._write(spot, self._tensors_of(spot))

    def check(self, spot: PieceSpot) -> None:
        """Read a piece that is not in memory, and free it. Raises ThinwireError where it is not what was written."""
        give_memory(each.tensor for each in spot.stored)
        try:
            self._read(spot)
        finally:
            _take_memory(each.tensor for each in spot.stored)

    def close(self) -> None:
        """Stop reading and writing."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _fits(self, *more: PieceSpot) -> bool:
        """Whether these are in memory beside what is on its way without more bytes than may be."""
        while self._leaving and next(iter(self._leaving.values())).done():
            self._end_writing()
        return sum(spot.memory_bytes for spot in {*more, *self.under_way}) <= self.most_bytes

    def read_ahead(self, spot: PieceSpot) -> None:
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
        give_memory(each.tensor for each in spot.stored)
        self._coming = spot, self._reader.submit(self._read, spot)

    def _end_reading(self) -> None:
        if self._coming is not None:
            (spot, coming), self._coming = self._coming, None
            coming.result()
            spot.is_here = True

    def _read(self, spot: PieceSpot) -> None:
        for each in spot.stored:
            self.slots.read(each, f"{spot.owned.slot.name!r} is")

    def _end_writing(self) -> None:
        spot = next(iter(self._leaving))
        self._leaving.pop(spot).result()

    def _leave(self, spot: PieceSpot, tensors: Sequence[Tensor]) -> None:
        self._write(spot, tensors)
        _take_memory((spot.owned.master, *tensors))

    def _write(self, spot: PieceSpot, tensors: Sequence[Tensor]) -> None:
        """Write what has changed of a piece that is in memory."""
        before = {(each.tensor, each.place): each for each in spot.stored}
        at, spot.stored = spot.place, []
        if spot.packet is not None:
            # The fp32 numbers of a checkpoint lie in front.
            at += aligned(spot.owned.master.nbytes)
        for tensor in tensors:
            stored = before.get((tensor, at)) or StoredTensor(tensor, at)
            self.slots.write(stored, spot.kept.get(at))
            spot.stored.append(stored)
            at += aligned(tensor.nbytes)
        assert at <= spot.place + spot.num_bytes - spot.paged_bytes


def give_memory(tensors: Iterable[Tensor]) -> None:
    """Give tensors memory again that have none."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.nbytes)


def _take_memory(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
