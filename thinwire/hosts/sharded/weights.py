"""Sends updated weights from the masters to the ranks that compute with them."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from thinwire.collectives.link import Link
from thinwire.collectives.rounds import Rounds
from thinwire.errors import ThinwireError
from thinwire.hosts.sharded.bucket import FlatBucket, LiveUnit, Slot
from thinwire.hosts.sharded.guard import Hook
from thinwire.hosts.sharded.seeds import Seeds
from thinwire.state.replicas import fingerprint

log = logging.getLogger("thinwire")
_HOSTS: WeakKeyDictionary[nn.Module, weakref.ref[Weights]] = WeakKeyDictionary()


class Weights:
    """Weights that are whole on every rank. They are sent once a step, and awaited on first use.

    Attributes:
        keeps: `keep` makes all of them whole on this rank.
        defers: weights that come and go are updated when they are next used.

    at_once: number of units to send when a step ends; None: all. Each of the others is sent when an earlier one is
    used.
    """

    keeps = True
    defers = False

    def __init__(self, units: Sequence[LiveUnit], seeds: Seeds, at_once: int | None = None) -> None:
        self.units, self.seeds, self.at_once = units, seeds, at_once
        self.unsent: deque[LiveUnit] = deque()
        # Whether other code changed weights since the ranks last compared theirs.
        self.edited = False
        self._versions = {bucket: versions_of(bucket) for unit in units for bucket in unit.buckets}
        self._coming: dict[LiveUnit, list[tuple[FlatBucket, Future[Any]]]] = {}

    def send(self, updated: Iterable[LiveUnit]) -> None:
        """Start to send the updated masters, in order of forward.

        updated: yields all units in their order, each as soon as its masters are updated.
        """
        self.unsent = deque(self.units)
        for number, _ in enumerate(updated):
            if self.at_once is None or number < self.at_once:
                self.send_next()

    def send_next(self) -> None:
        """Start to send one more unit, if any is left."""
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
        """Wait until the unit's resident weights are up to date. Return whether they were still on their way."""
        while unit in self.unsent:
            self.send_next()
        if unit not in self._coming:
            return False
        for bucket, future in self._coming[unit]:
            bucket.comm.wait(future)
            if bucket.away is not None:
                bucket.away.sent(bucket)
        del self._coming[unit]
        return True

    def wait_all(self) -> None:
        """Wait until all resident weights are up to date."""
        for unit in self.units:
            self.wait(unit)

    def forget(self) -> None:
        """After all messages have ended, wait for no more of them. Weights that did not arrive stay as they are."""
        self.unsent.clear()
        self._coming.clear()

    def bring(self, units: Sequence[LiveUnit]) -> None:
        """Wait until these units' weights are whole and up to date."""
        for unit in units:
            self.wait(unit)

    def keep(self) -> None:
        """Bring all weights to this rank, where they stay whole until the next backward."""
        self.bring(self.units)

    def settle(self) -> None:
        """Wait until all weights are up to date, and copy changes from outside, such as loading, to the masters.

        Each rank checks the part of the weights for which it has the masters. Of other parts it notes that they were
        changed, for the ranks to compare.
        """
        self.wait_all()
        for bucket in (bucket for unit in self.units for bucket in unit.buckets if not self.is_away(bucket)):
            for slot in bucket.slots:
                if slot.param.data_ptr() != slot.span.of(bucket.live).data_ptr():
                    raise moved(slot)
            if fingerprint(bucket.own) != bucket.seen:
                self.tell_of_edits(bucket, [slot.name for slot in bucket.slots])
                bucket.set_masters(bucket.own.float())
                bucket.note()
            versions = versions_of(bucket)
            self.edited = self.edited or versions != self._versions[bucket]
            self._versions[bucket] = versions

    def free(self) -> None:
        """Wait until no weights are on their way. Nothing computes with them until `bring` is called again."""
        self.wait_all()

    def is_away(self, bucket: FlatBucket) -> bool:
        """Whether the bucket's weights come and go by themselves."""
        return False

    @contextmanager
    def held(self, bucket: FlatBucket) -> Iterator[FlatBucket]:
        """Context with the bucket's weights in memory, where they may be changed."""
        yield bucket

    def reads_rows(self, module: nn.Module) -> bool:
        """Whether a module's forward brings the rows of its weight that it needs, and no others."""
        return False

    def tell_of_edits(self, bucket: FlatBucket, names: Sequence[str]) -> None:
        """Warn that other code changed weights, and that the changes are kept; note it for the other ranks."""
        where = f"of {names[0]!r}" if len(names) == 1 else f"between {names[0]!r} and {names[-1]!r}"
        log.warning(
            "thinwire: rank %d: weights %s were changed outside the optimizer; their new values are taken as the "
            "masters, and the next step compares the ranks' weights",
            bucket.comm.global_ranks[bucket.comm.rank], where,
        )  # fmt: skip
        self.edited = True

    def shard(self, bucket: FlatBucket) -> Tensor:
        """The compute weights of a bucket on this rank. Read them before you ask for another bucket's."""
        return bucket.shard

    def own(self, bucket: FlatBucket) -> Tensor:
        """The compute weights for which this rank has the masters, wherever they lie. Read only."""
        return bucket.own

    def is_done_with(self, unit: LiveUnit) -> None:
        """Note that the unit's backward has ended."""
        self.wait(unit)

    def lacks(self, module: nn.Module) -> str | None:
        """A parameter of the module whose present values may not be in memory; None: there is none."""
        params = module.named_parameters()
        return next((name for name, param in params if param.numel() and not param.untyped_storage().nbytes()), None)

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """See `whole`."""
        yield


def units_by_module(model: nn.Module, units: Iterable[LiveUnit]) -> dict[nn.Module, list[LiveUnit]]:
    """For each module, the units that have a parameter of its own."""
    unit_of = {id(slot.param): unit for unit in units for slot in unit.slots}
    found = dict[nn.Module, list[LiveUnit]]()
    for module in model.modules():
        own = (unit_of.get(id(param)) for param in module._parameters.values())
        found[module] = list(dict.fromkeys(unit for unit in own if unit is not None))
    return found


def brings(weights: Weights, model: nn.Module) -> None:
    """Let `whole` ask these weights for those of the model's modules. A `state_dict()` without it is refused."""
    # What brings weights holds modules, so that a stronger reference would keep both for ever.
    _HOSTS.update(dict.fromkeys(model.modules(), weakref.ref(weights)))
    for module in model.modules():
        module.register_state_dict_pre_hook(Hook(_check_whole))


def _check_whole(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise ThinwireError if `state_dict` would have parameters without values."""
    # With keep_vars it has the parameters themselves.
    host = _HOSTS[module]() if module in _HOSTS and not keep_vars else None
    if host is not None and (name := host.lacks(module)) is not None:
        raise ThinwireError(
            f"state_dict() of {type(module).__name__}: the values of {name} lie on a disk or on other ranks; nearest: "
            "call it inside `with thinwire.whole(module):` on every rank, layer by layer if not all fit in memory"
        )


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """A context in which all of a module's weights are in memory, to be read or edited in place.

    Edits reach the masters when it ends. Use it, on every rank alike, if weights lie on a disk or are cut over ranks;
    elsewhere it has no effect.
    """
    host = _HOSTS[module]() if module in _HOSTS else None
    with nullcontext() if host is None else host.whole(module):
        yield


def versions_of(bucket: FlatBucket) -> list[int]:
    """How often other code wrote to each parameter in place; what the host does is not counted."""
    return [slot.param._version for slot in bucket.slots]


def moved(slot: Slot) -> RuntimeError:
    """The error for a parameter that no longer lies in the memory that the host trains."""
    return RuntimeError(
        f"{slot.name!r} no longer lies where zero() put it, so training would not reach it: convert, move or load with "
        "assign=True before calling zero(), and copy new values in place after"
    )
