"""Steps each bucket when its mean gradients arrive, during backward, so that none of them waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from thinwire.codecs import derive_seed
from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit
from thinwire.hosts.sums import JoinedSums
from thinwire.methods.sharded import cut_by
from thinwire.methods.sums import ParamGroups, parts_of, rounds_of
from thinwire.optim import SummingOptimizer
from thinwire.optim.sums import Values
from thinwire.state.agreement import StepStatus


class BucketStates(Protocol):
    """Masters and states of an optimizer that can step one bucket's parameters without the others."""

    def step_bucket(self, bucket: FlatBucket, used: Collection[str]) -> None:
        """Update the masters of those of the bucket's parameters that are `used`."""
        ...

    def ready(self) -> Iterator[LiveUnit]:
        """Yield each unit, in order, with its updated masters where they are sent from."""
        ...


class StepsAtOnce:
    """Takes the mean gradients of a bucket, steps its parameters, and frees them.

    The ranks agree for each bucket which of its parameters had a gradient, and whether all of them are finite: if not,
    the bucket is not stepped. Its sums are taken in messages of their own. So a step has the bits of one that waits for
    all gradients, but for random rounding of sums.

    Attributes:
        norms_of, norms: see GradientsOnDisk.
        used: the parameters of this step that had a gradient on this rank.
        bytes_per_step: payload bytes that this rank sends for all this.
    """

    def __init__(
        self, inner: SummingOptimizer, states: BucketStates, buckets: Sequence[FlatBucket], across: ParamGroups,
        seed: Callable[[], int],
    ) -> None:  # fmt: skip
        assert inner.shards is not None
        self.states, self.used = states, set[str]()
        self.norms_of: Callable[[FlatBucket], list[float]] = lambda _: []
        self.norms: dict[FlatBucket, list[float]] = {}
        self._sums: dict[FlatBucket, JoinedSums] = {}
        self._current: JoinedSums | None = None
        self.bytes_per_step = 0
        for number, bucket in enumerate(buckets):
            parts = parts_of(cut_by([bucket.layout], across), bucket.comm.rank, across)
            rounds = rounds_of(inner, parts, bucket.comm.topology)
            own = partial(_seed_of, seed, number)
            sums = self._sums[bucket] = JoinedSums(inner, [(bucket.comm, rounds)], own, bucket.live.device)
            self.bytes_per_step += sums.bytes_per_step + self._ranks(bucket).word_bytes(len(bucket.slots))
        inner.shards = replace(inner.shards, total=self._total)

    def _ranks(self, bucket: FlatBucket) -> Ranks:
        return Ranks(bucket.comm, bucket.comm)

    def _total(self, number: int, partials: Mapping[str, Values]) -> Mapping[str, Values]:
        assert self._current is not None
        return self._current.total(number, partials)

    def leave(self, bucket: FlatBucket) -> None:
        """Step a bucket's parameters, and free its gradients. A collective."""
        norms = self.norms[bucket] = self.norms_of(bucket)
        names = [slot.name for slot in bucket.slots]
        status = StepStatus(sum((norm * norm for norm in norms), 0.0), used=[name in self.used for name in names])
        agreed = self._ranks(bucket).agree(status)
        if math.isfinite(agreed.norm):
            self._current = self._sums[bucket]
            self.states.step_bucket(bucket, {name for name, used in zip(names, agreed.used, strict=True) if used})
            self._current = None
        bucket.shard_grad.untyped_storage().resize_(0)

    def scale(self, factor: float) -> None:
        """Raises RuntimeError: nothing is left to be scaled."""
        raise RuntimeError("gradients were stepped as they arrived, and can't be scaled")

    def end(self) -> None:
        """See Keeper."""
        self.norms.clear()


def _seed_of(seed: Callable[[], int], number: int) -> int:
    """That of the sums of a bucket."""
    return derive_seed(seed(), number)
