"""Updated weights on their way from the masters to the ranks that compute with them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.state.replicas import fingerprint

log = logging.getLogger("thinwire")


class Weights:
    """Weights that are whole on every rank: sent once a step, awaited by whoever needs them.

    at_once: units that are sent when a step ends; None: all. Each of the others follows when an earlier one is needed.
    """

    def __init__(self, units: Sequence[LiveUnit], seeds: Seeds, at_once: int | None = None) -> None:
        self.units, self.seeds, self.at_once = units, seeds, at_once
        self.unsent: deque[LiveUnit] = deque()
        self._coming: dict[LiveUnit, list[tuple[FlatBucket, Future[None]]]] = {}

    def send(self, updated: Iterable[LiveUnit]) -> None:
        """Begin to send what the masters have become, in order of forward.

        updated: all units in their order, each as soon as its masters are up to date.
        """
        self.unsent = deque(self.units)
        for number, _ in enumerate(updated):
            if self.at_once is None or number < self.at_once:
                self.send_next()

    def send_next(self) -> None:
        """Send one more unit, if any is left."""
        if self.unsent:
            unit = self.unsent.popleft()
            self._coming[unit] = [(bucket, bucket.comm.submit(self._job(bucket))) for bucket in unit.buckets]

    def _job(self, bucket: FlatBucket) -> Callable[[Link], Rounds[None]]:
        wire, seed = bucket.layout.wire, self.seeds.weights(bucket.layout)
        message = bucket.master if bucket.away is None else bucket.shard_grad
        return partial(bucket.refresh, message=message, codec=wire.weights, differences=wire.differences, seed=seed)

    def is_coming(self, unit: LiveUnit) -> bool:
        """Whether the unit's weights were updated and nobody has waited for them since."""
        return unit in self._coming or unit in self.unsent

    def wait(self, unit: LiveUnit) -> bool:
        """Return when what stays of the unit's weights is up to date; whether it was not known to be."""
        while unit in self.unsent:
            self.send_next()
        if unit not in self._coming:
            return False
        for bucket, future in self._coming[unit]:
            bucket.comm.wait(future)
        del self._coming[unit]
        return True

    def wait_all(self) -> None:
        """Return when what stays of all weights is up to date."""
        for unit in self.units:
            self.wait(unit)

    def forget(self) -> None:
        """Wait for nothing any more, after all messages have ended: weights that have not come stay as they are."""
        self.unsent.clear()
        self._coming.clear()

    def bring(self, units: Sequence[LiveUnit]) -> None:
        """Return when these units' weights are whole and up to date."""
        for unit in units:
            self.wait(unit)

    def keep(self) -> None:
        """Bring all weights to this rank, where they stay whole until the next backward."""
        self.bring(self.units)

    def settle(self) -> None:
        """Return when all weights are up to date; what was changed from outside, say by loading it, is in the masters.

        A rank looks at the part of the weights whose masters it has.
        """
        self.wait_all()
        for bucket in (bucket for unit in self.units for bucket in unit.buckets if not self.is_away(bucket)):
            for slot in bucket.slots:
                if slot.param.data_ptr() != slot.span.of(bucket.live).data_ptr():
                    raise moved(slot)
            if fingerprint(bucket.own) != bucket.seen:
                tell_of_edits(bucket, [slot.name for slot in bucket.slots])
                bucket.set_masters(bucket.own.float())
                bucket.note()

    def free(self) -> None:
        """Return when nothing is on its way; nobody computes with the weights until they are brought again."""
        self.wait_all()

    def is_away(self, bucket: FlatBucket) -> bool:
        """Whether the bucket's weights come and go by themselves."""
        return False

    @contextmanager
    def held(self, bucket: FlatBucket) -> Iterator[FlatBucket]:
        """The bucket with its weights in memory, to be changed."""
        yield bucket

    def shard(self, bucket: FlatBucket) -> Tensor:
        """The compute weights that this rank holds of a bucket, to be read before another bucket's."""
        return bucket.shard

    def own(self, bucket: FlatBucket) -> Tensor:
        """The compute weights of which this rank has the masters, wherever they lie; to be read."""
        return bucket.own

    def is_done_with(self, unit: LiveUnit) -> None:
        """The unit's backward has ended."""
        self.wait(unit)


def moved(slot: Slot) -> RuntimeError:
    """What to raise where a parameter is no longer in the memory that the host trains."""
    return RuntimeError(
        f"{slot.name!r} no longer lies where zero() put it, so training would not reach it: convert, move or load with "
        "assign=True before calling zero(), and copy new values in place after"
    )


def tell_of_edits(bucket: FlatBucket, names: Sequence[str]) -> None:
    """Warn that weights were changed by somebody else, and are kept."""
    where = f"of {names[0]!r}" if len(names) == 1 else f"between {names[0]!r} and {names[-1]!r}"
    log.warning(
        "thinwire: rank %d: weights %s were changed outside the optimizer; their new values are taken as the masters",
        bucket.comm.global_ranks[bucket.comm.rank], where,
    )  # fmt: skip
