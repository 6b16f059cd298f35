"""Weights on a disk. Buckets are loaded when needed; the one that is needed last makes room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.hosts.offload.uses import Uses
from thinwire.hosts.sharded.bucket import FlatBucket, Slot
from thinwire.layout.buckets import BucketLayout
from thinwire.methods.memory.placement import deferred
from thinwire.methods.memory.setup import SMALL_NUMEL
from thinwire.tiers import ChunkedFile, DiskFile, DiskRows, Pace, TierMeter
from thinwire.tiers.pool import aligned


@dataclass(eq=False)
class Spot:
    """Where a bucket's weights are. is_locked: being changed; they stay in memory.

    is_dirty: the disk has old values. own_sums: of the part of which this rank has the masters, if it is read alone.
    rows: of matrices of which single rows are read, by name. update: adds what an update changes, before the next use;
    None: nothing is to be added.
    """

    place: int
    num_bytes: int
    is_here: bool = True
    is_locked: bool = False
    is_dirty: bool = False
    reading: Future[None] | None = None
    writing: Future[None] | None = None
    sums: list[int] = field(default_factory=list)
    own_sums: list[int] = field(default_factory=list)
    rows: dict[str, DiskRows] = field(default_factory=dict)
    update: Callable[[], None] | None = None

    def finish(self) -> None:
        """Wait until no read or write of the bucket is running."""
        for future in (self.reading, self.writing):
            if future is not None:
                future.result()
        self.reading = self.writing = None


class Replicas:
    """The weights that this rank keeps of large buckets, in one file. As many as `capacity_bytes` allows are in memory.

    The order of use is learnt: an update goes through all buckets in order of forward, and each step is expected to use
    them in the same order as the last. The next buckets are read ahead, as many as fit, and the one that is needed last
    is evicted. If a step uses another order, buckets are loaded on demand. Forwards of an evaluation have an order of
    their own, that of the last one, and are expected to go on from its end to its beginning; the first one is expected
    to begin as a step does.

    A bucket's memory comes and goes inside the same storage, so that views of it, such as those that autograd saves,
    never show another bucket's weights.

    An update of a bucket that is among `deferred` is added when the bucket is used next. Until then the update alone is
    in memory, and the bucket, there or on the disk, has the values before it.

    Attributes:
        holds_last: the bucket that was used last is still in use when the next one is; False: only `pinned` ones are.

    num_held: buckets for which the capacity suffices at first.
    """

    def __init__(
        self, folder: Path, layouts: Sequence[BucketLayout], meter: TierMeter, pace: Pace, num_held: int
    ) -> None:
        sizes = [bytes_of(layout) for layout in layouts if is_large(layout)]
        self.meter, self.total_bytes, self.used_bytes, self._end = meter, sum(sizes), 0, 0
        self.file = DiskFile(folder, sum(map(aligned, sizes)), meter, pace)
        self.capacity_bytes = num_held * max(sizes, default=0)
        self.spots: dict[FlatBucket, Spot] = {}
        self._number: dict[FlatBucket, int] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        self._inwards, self._outwards = ChunkedFile(self.file), ChunkedFile(self.file)
        # What a step touches in turn, what a forward without gradients does, and which of both is under way.
        self._training, self._evaluation = Uses(), Uses()
        self._uses = self._training
        self._num_updated = 0
        self._in_use: set[FlatBucket] = set()
        self.holds_last = True
        # What others read of a bucket that was brought, besides the training thread.
        self.pinned: set[FlatBucket] = set()
        self._owner: dict[int, FlatBucket] = {}
        # Buckets whose updates may be deferred, those whose updates are, and their own parts that are read ahead.
        self.deferrable: list[FlatBucket] = []
        self.deferred: set[FlatBucket] = set()
        self._parts: dict[FlatBucket, Future[Tensor]] = {}

    def take(self, bucket: FlatBucket) -> None:
        """Write a new bucket to the disk, if it is large, and free its memory."""
        if not is_large(bucket.layout):
            return
        bucket.passes = True
        spot = self.spots[bucket] = Spot(self._end, bytes_of(bucket.layout))
        self._number[bucket] = len(self._number)
        self._end += aligned(spot.num_bytes)
        self.used_bytes += spot.num_bytes
        self._write(bucket, spot)
        self._leave(bucket)

    def fit(self, buckets: Sequence[FlatBucket]) -> None:
        """Make the capacity large enough for buckets that are used together, and for the one that comes next."""
        largest = max((spot.num_bytes for spot in self.spots.values()), default=0)
        together = sum(self.spots[bucket].num_bytes for bucket in buckets)
        self.capacity_bytes = max(self.capacity_bytes, together + largest)

    def bring(self, *buckets: FlatBucket) -> None:
        """Wait until the weights of buckets that are used together are in memory. Starts to read the next ones."""
        large = [bucket for bucket in buckets if bucket in self.spots]
        self._in_use = {*large, *self._last}
        for bucket in large:
            self._bring(bucket, self.spots[bucket])
        if large:
            self._read_ahead()

    def _bring(self, bucket: FlatBucket, spot: Spot) -> None:
        self._uses.note(bucket)
        self._begin(bucket)
        if spot.reading is not None:
            with self.meter.waiting():
                spot.reading.result()
            spot.reading = None
        if spot.update is not None:
            with self.meter.waiting():
                spot.finish()
            spot.update()
            spot.update = None
            self.changed(bucket)

    def claim(self, bucket: FlatBucket) -> None:
        """Give a bucket memory and lock it, to be overwritten: its content is not read."""
        if bucket in self.spots:
            self._in_use = {bucket, *self._last}
            self._begin(bucket, reads=False)
            self.lock(bucket)

    def defer_within(self, num_bytes: int) -> int:
        """Let updates wait for the next use of their bucket, as many as fit. Return their bytes."""
        fit = {id(layout) for layout in deferred((bucket.layout for bucket in self.deferrable), num_bytes)}
        self.deferred = {bucket for bucket in self.deferrable if id(bucket.layout) in fit}
        return sum(bucket.layout.update_bytes for bucket in self.deferred)

    def defer(self, bucket: FlatBucket, update: Callable[[], None]) -> None:
        """Note what adds an update to the weights of a bucket. It is called before their next use."""
        self.spots[bucket].update = update

    def expect_own(self, bucket: FlatBucket) -> None:
        """Start to read what `own` returns, unless the bucket is in memory."""
        spot = self.spots[bucket]
        if not (spot.is_here or spot.update is not None or bucket in self._parts):
            self._parts[bucket] = self._reader.submit(self._read_own, bucket, spot)

    def own(self, bucket: FlatBucket) -> Tensor:
        """The weights of a bucket for which this rank has the masters. From the disk they are read alone."""
        spot = self.spots[bucket]
        if spot.update is not None:
            self.bring(bucket)
        self.expect_own(bucket)
        coming = self._parts.pop(bucket, None)
        with self.meter.waiting():
            if not spot.is_here and coming is not None:
                return coming.result()
            if spot.reading is not None:
                spot.reading.result()
        return bucket.own

    def lock(self, bucket: FlatBucket) -> None:
        """Note that a bucket, which is in memory, is about to be changed."""
        if spot := self.spots.get(bucket):
            spot.finish()
            spot.is_locked = True

    def changed(self, bucket: FlatBucket) -> None:
        """Note that a bucket was changed. It is written before it is evicted.

        If not all buckets fit, writing starts now.
        """
        if spot := self.spots.get(bucket):
            spot.is_locked, spot.is_dirty = False, True
            if self.capacity_bytes < self.total_bytes:
                self._write_behind(bucket, spot)

    def _write_behind(self, bucket: FlatBucket, spot: Spot) -> None:
        if spot.is_dirty:
            spot.is_dirty = False
            spot.writing = self._writer.submit(self._write, bucket, spot)

    @contextmanager
    def held(self, bucket: FlatBucket) -> Iterator[FlatBucket]:
        """Context with the bucket in memory, where it may be changed."""
        self.bring(bucket)
        self.lock(bucket)
        yield bucket
        self.changed(bucket)

    def make_room(self, num_bytes: int = 0) -> None:
        """Evict buckets that are needed last until `num_bytes` more fit. Buckets in use stay."""
        while self.used_bytes + num_bytes > self.capacity_bytes and (free := self._free()):
            self._leave(max(free, key=self._next_use))

    def begin_update(self) -> None:
        """Note that an update goes through buckets in their order; the next step is expected to repeat this one's."""
        read = [bucket for bucket in self.spots if bucket.layout.adds_updates and bucket not in self.deferred]
        self._training.begin([*read, *self._training.seen[self._num_updated :]])

    def end_update(self) -> None:
        """Note that what is used from now on belongs to the next forward. Starts to read it."""
        self._num_updated = len(self._training.seen)
        self._in_use = set()
        self._read_ahead()

    def begin_evaluation(self) -> None:
        """Note that a forward without gradients begins."""
        self._uses = self._evaluation
        self._uses.begin(2 * self._uses.seen or self._training.to_come)

    def end_evaluation(self) -> None:
        """Note that a forward without gradients has ended."""
        self._uses = self._training

    def add_rows(self, slot: Slot) -> None:
        """Let `rows` read single rows of this matrix."""
        spot, (num_rows, width), itemsize = self.spots[slot.bucket], slot.span.shape, slot.bucket.layout.dtype.itemsize
        place = spot.place + slot.span.start * itemsize
        store = DiskRows(self.file, place, num_rows, width, slot.bucket.layout.dtype)
        with self.held(slot.bucket):
            spot.rows[slot.name] = store

    def rows(self, slot: Slot, numbers: Tensor) -> Tensor | None:
        """Rows of a matrix, read from the disk; None if the whole matrix is in memory."""
        spot = self.spots[slot.bucket]
        with self.meter.waiting():
            spot.finish()
            return None if spot.is_here else spot.rows[slot.name].gather(numbers)

    def mapped(self, bucket: FlatBucket) -> Tensor:
        """The bucket's weights as a view of the file, read when accessed."""
        spot = self.spots[bucket]
        if spot.update is not None:
            self.bring(bucket)
        self._write_behind(bucket, spot)
        spot.finish()
        return self.file.mapped(spot.place, spot.num_bytes).view(bucket.layout.dtype)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd saves for a tensor; for a view of evictable weights, the bucket that it belongs to."""
        bucket = self._owner.get(tensor.untyped_storage().data_ptr())
        return tensor if bucket is None else (bucket, tensor)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor that was packed, with its weights in memory."""
        if isinstance(kept, Tensor):
            return kept
        bucket, tensor = kept
        self.bring(bucket)
        return tensor

    def close(self) -> None:
        """Free the disk space. Weights that are not in memory are lost."""
        self._reader.shutdown()
        self._writer.shutdown()
        for store in (store for spot in self.spots.values() for store in spot.rows.values()):
            store.close()
        self.file.close()

    @property
    def _last(self) -> list[FlatBucket]:
        """The most recent one, if it may be in use."""
        return self._uses.seen[-1:] if self.holds_last else []

    def _next_use(self, bucket: FlatBucket) -> int:
        until = self._uses.until(bucket)
        return len(self._uses.expected) + self._number[bucket] if until is None else until

    def _free(self) -> list[FlatBucket]:
        """The buckets that may be evicted."""
        busy = self._in_use.union(self._last, self.pinned)
        return [b for b, spot in self.spots.items() if spot.is_here and not spot.is_locked and b not in busy]

    def _begin(self, bucket: FlatBucket, *, reads: bool = True) -> None:
        spot = self.spots[bucket]
        if spot.is_here:
            return
        self.make_room(spot.num_bytes)
        storage = bucket.shard.untyped_storage()
        storage.resize_(spot.num_bytes)
        self._owner[storage.data_ptr()] = bucket
        self.used_bytes += spot.num_bytes
        spot.is_here = True
        if reads:
            spot.reading = self._reader.submit(self._read, bucket, spot)

    def _leave(self, bucket: FlatBucket) -> None:
        spot, storage = self.spots[bucket], bucket.shard.untyped_storage()
        self._write_behind(bucket, spot)
        with self.meter.waiting():
            spot.finish()
        self._owner.pop(storage.data_ptr(), None)
        storage.resize_(0)
        self.used_bytes -= spot.num_bytes
        spot.is_here = False

    def _read_ahead(self) -> None:
        """Start to read the next buckets that are not in memory, as many as fit beside those needed earlier."""
        for following in self._uses.to_come:
            if self.spots[following].is_here:
                continue
            use, needed = self._next_use(following), self.used_bytes + self.spots[following].num_bytes
            later = sum(self.spots[bucket].num_bytes for bucket in self._free() if self._next_use(bucket) > use)
            if needed - later > self.capacity_bytes:
                return
            self._begin(following)

    def _read(self, bucket: FlatBucket, spot: Spot) -> None:
        self._inwards.read(spot.place, bucket.shard, spot.sums, "weights are")

    def _read_own(self, bucket: FlatBucket, spot: Spot) -> Tensor:
        part = torch.empty_like(bucket.own)
        start = int(bucket.own.storage_offset()) * part.itemsize
        self._inwards.read_part(spot.place + start, part, spot.own_sums, "weights are")
        return part

    def _write(self, bucket: FlatBucket, spot: Spot) -> None:
        spot.sums = self._outwards.write(spot.place, bucket.shard)
        if bucket.layout.adds_updates:
            spot.own_sums = self._outwards.sums(bucket.own)
        for slot in bucket.slots:
            if slot.name in spot.rows:
                spot.rows[slot.name].note(slot.span.of(bucket.shard))


def bytes_of(layout: BucketLayout) -> int:
    """Bytes of what a rank keeps of a bucket's weights."""
    return layout.numel * layout.dtype.itemsize // layout.levels.weights_over


def is_large(layout: BucketLayout) -> bool:
    """Whether a bucket's weights are stored on the disk and evicted from memory."""
    return layout.numel >= SMALL_NUMEL
