"""Mean gradients on a disk, from their reduction to the update that uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.hosts.sharded.bucket import FlatBucket
from thinwire.tiers import ChunkedFile, DiskFile, Pace, TierMeter
from thinwire.tiers.pool import aligned

# Buckets whose gradients are being written; the next one waits for the disk.
MOST_WRITTEN = 2


@dataclass(eq=False)
class GradientPlace:
    """Where a bucket's gradients are. moving: the last read or write of them."""

    place: int
    is_here: bool = True
    moving: Future[None] | None = None
    sums: list[int] = field(default_factory=list)


class GradientsOnDisk:
    """The mean gradients of which this rank has the masters, in a file.

    A bucket's `shard_grad` has memory while it is reduced, and from the read before its update until its updated
    masters, which lie in it too, have been sent. Buckets are read in order of forward, each while the one before it is
    stepped.

    Attributes:
        norms_of: the 2-norms that are taken of gradients before they leave, so that they need not be read for that.
        norms: those of this step's gradients.
    """

    def __init__(self, folder: Path, buckets: Sequence[FlatBucket], meter: TierMeter, pace: Pace) -> None:
        self._buckets, self.meter, self.num_bytes = list(buckets), meter, sum(b.shard_bytes for b in buckets)
        self._kept: dict[FlatBucket, GradientPlace] = {}
        end = 0
        for bucket in buckets:
            self._kept[bucket] = GradientPlace(end)
            end += aligned(bucket.shard_bytes)
        self.file = DiskFile(folder, end, meter, pace)
        self._inwards, self._outwards = ChunkedFile(self.file), ChunkedFile(self.file)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="thinwire-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="thinwire-write")
        self._written: deque[Future[None]] = deque()
        self._factors: list[float] = []
        self.norms_of: Callable[[FlatBucket], list[float]] = lambda _: []
        self.norms: dict[FlatBucket, list[float]] = {}
        for bucket in buckets:
            self.free(bucket)

    def leave(self, bucket: FlatBucket) -> None:
        """Write gradients that have been reduced, and free their memory."""
        kept = self._kept[bucket]
        self.norms[bucket] = self.norms_of(bucket)
        kept.moving = self._writer.submit(self._write, bucket, kept)
        kept.is_here = False
        self._written.append(kept.moving)
        with self.meter.waiting():
            while len(self._written) > MOST_WRITTEN:
                self._written.popleft().result()

    def scale(self, factor: float) -> None:
        """Multiply all gradients on the disk by a factor, when they are read."""
        self._factors.append(factor)

    def bring(self, bucket: FlatBucket) -> None:
        """Wait until a bucket's gradients are in memory. Starts to read those of the next bucket."""
        self._begin(bucket)
        kept = self._kept[bucket]
        if kept.moving is not None:
            with self.meter.waiting():
                kept.moving.result()
            kept.moving = None
        following = self._buckets.index(bucket) + 1
        if following < len(self._buckets):
            self._begin(self._buckets[following])

    def free(self, bucket: FlatBucket) -> None:
        """Free the memory of a bucket's gradients, which are used no more."""
        bucket.shard_grad.untyped_storage().resize_(0)

    def end(self) -> None:
        """Wait for all that is written. The next gradients are of another step."""
        while self._written:
            self._written.popleft().result()
        self._factors.clear()
        self.norms.clear()

    def close(self) -> None:
        """Free the disk space."""
        self._reader.shutdown()
        self._writer.shutdown()
        self.file.close()

    def _begin(self, bucket: FlatBucket) -> None:
        kept = self._kept[bucket]
        if not kept.is_here:
            kept.is_here, kept.moving = True, self._reader.submit(self._read, bucket, kept, kept.moving)

    def _read(self, bucket: FlatBucket, kept: GradientPlace, writing: Future[None] | None) -> None:
        if writing is not None:
            writing.result()
        bucket.hold_gradients()
        self._inwards.read(kept.place, bucket.shard_grad, kept.sums, "gradients are")
        for factor in self._factors:
            bucket.shard_grad.mul_(factor)

    def _write(self, bucket: FlatBucket, kept: GradientPlace) -> None:
        kept.sums = self._outwards.write(kept.place, bucket.shard_grad)
        self.free(bucket)
