"""The order in which buckets are used, as it was the last time."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.hosts.sharded.bucket import FlatBucket


class Uses:
    """What is expected to be used in turn, how far that has come, and what was used itself."""

    def __init__(self) -> None:
        self.expected: list[FlatBucket] = []
        self.seen: list[FlatBucket] = []
        self._at = 0

    def begin(self, expected: Sequence[FlatBucket]) -> None:
        """Begin anew, and expect this order."""
        self.expected, self.seen, self._at = list(expected), [], 0

    def note(self, bucket: FlatBucket) -> None:
        """Note that a bucket is used."""
        if not self.seen or self.seen[-1] is not bucket:
            self.seen.append(bucket)
            if bucket in self.to_come:
                self._at = self.expected.index(bucket, self._at) + 1

    @property
    def to_come(self) -> list[FlatBucket]:
        """What is expected to be used from now on."""
        return self.expected[self._at :]

    def until(self, bucket: FlatBucket) -> int | None:
        """When a bucket is expected to be used next; None: not any more.

        With no known order, the least recently used bucket comes last.
        """
        if not self.expected:
            return -(len(self.seen) - self.seen[::-1].index(bucket)) if bucket in self.seen else 1
        return self.expected.index(bucket, self._at) if bucket in self.to_come else None
