"""Says whom a rank waits for, while it still waits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

log = logging.getLogger("thinwire")

# A wait is told after so long, or after FACTOR times the longest that has ended well: slow links make long waits.
FIRST_S, FACTOR = 30.0, 3.0
LOOK_EVERY_S = 1.0
# The store may be hosted by the process that hangs.
STORE_S = 2.0
WAITS_FOR, TOLD = "thinwire/waits/{}", "thinwire/told/{}/{}"


class WaitingWire(Protocol):
    """Of a wire, what a message about a wait needs."""

    rank: int
    timeout_s: float
    global_ranks: list[int]

    def name(self, rank: int) -> str: ...

    def store(self) -> dist.Store: ...


@dataclass(eq=False)
class LongWait:
    """A message of a peer that has not come yet.

    Args:
        due_s: seconds of waiting after which it is told again.
        keys: what this rank has put into the store because of it.
    """

    wire: WaitingWire
    peer: int
    operation: str
    since: float
    due_s: float
    keys: list[str] = field(default_factory=list)


class Patience:
    """Looks at the waits of this process, and tells those that are far longer than all before them.

    A rank also posts in the ranks' store whom it waits for, so that a message names the end of the chain: rank 0 waits
    for rank 3, which waits for rank 2. Each rank logs its message. Of the ranks of a machine that wait for the same one
    in the end, the first hands its message to `announce`.
    """

    def __init__(self) -> None:
        self.announce: Callable[[str], None] | None = None
        self._waits: set[LongWait] = set()
        self._over: list[LongWait] = []
        self._longest_s = 0.0
        self._why = ""
        threading.Thread(target=self._look, name="thinwire-patience", daemon=True).start()

    @contextmanager
    def because(self, why: str) -> Iterator[None]:
        """Around long waits that are no fault. why: what the awaited rank does."""
        self._why = why
        try:
            yield
        finally:
            self._why = ""

    @contextmanager
    def wait(self, wire: WaitingWire, peer: int, operation: str) -> Iterator[None]:
        """Around a wait for a message of a rank of the wire."""
        since = time.monotonic()
        one = LongWait(wire, peer, operation, since, max(FIRST_S, FACTOR * self._longest_s))
        self._waits.add(one)
        try:
            yield
            self._longest_s = max(self._longest_s, time.monotonic() - since)
        finally:
            self._waits.discard(one)
            if one.keys:
                self._over.append(one)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            while self._over:
                _beside(_take_back, self._over.pop())
            wait = min(self._waits.copy(), key=lambda one: one.since, default=None)
            if wait is not None:
                waited_s = time.monotonic() - wait.since
                if waited_s >= wait.due_s / 2 and not wait.keys:
                    _beside(_post, wait)
                    if wait not in self._waits:
                        # It has ended meanwhile.
                        self._over.append(wait)
                if waited_s >= wait.due_s:
                    wait.due_s *= 2
                    self._tell(wait, waited_s)

    def _tell(self, wait: LongWait, waited_s: float) -> None:
        chain: list[str] = []
        was_told = _beside(_follow, wait, chain)
        which = "".join(f", which waits for {name}" for name in chain)
        because = f", because {self._why}" if self._why else ""
        me, peer = wait.wire.name(wait.wire.rank), wait.wire.name(wait.peer)
        text = (
            f"thinwire: {me} has waited {waited_s:.0f} s for {peer}{which} ({wait.operation}){because}; after "
            f"{wait.wire.timeout_s:g} s without a message the run ends"
        )
        if self.announce is not None and not was_told:
            self.announce(text)
        else:
            log.warning("%s", text)


def _beside(work: Callable[..., bool], *args: object) -> bool:
    """What `work` returns; False if the store does not answer: then its thread is left behind."""
    found: list[bool] = []

    def quietly() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(work(*args))

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(STORE_S)
    return found == [True]


def _post(wait: LongWait) -> bool:
    """Put into the store for whom this rank waits."""
    wire = wait.wire
    wait.keys.append(WAITS_FOR.format(wire.global_ranks[wire.rank]))
    wire.store().set(wait.keys[-1], str(wire.global_ranks[wait.peer]))
    return True


def _take_back(wait: LongWait) -> bool:
    """Undo what `_post` and `_follow` have put into the store."""
    store, (mine, *told) = wait.wire.store(), wait.keys
    # Another rank may be about to read it, and would wait for a key that is gone.
    store.set(mine, "")
    for key in told:
        store.delete_key(key)
    return True


def _follow(wait: LongWait, chain: list[str]) -> bool:
    """Add to `chain` for whom the awaited peer waits, and so on.

    Returns whether another rank of this machine has told already that it waits for the last of them.
    """
    wire, store = wait.wire, wait.wire.store()
    seen, awaited = {wire.global_ranks[wire.rank]}, wire.global_ranks[wait.peer]
    while awaited not in seen and store.check([key := WAITS_FOR.format(awaited)]) and (after := store.get(key)):
        seen.add(awaited)
        awaited = int(after)
        chain.append(f"{wire.name(wait.peer).split()[0]} {awaited}")
    told = TOLD.format(os.environ.get("GROUP_RANK", "0"), awaited)
    if told not in wait.keys and store.add(told, 1) > 1:
        return True
    wait.keys.append(told)
    return False


_patience: Patience | None = None


def patience() -> Patience:
    """The process's watch over its waits, which the first call starts."""
    global _patience
    if _patience is None:
        _patience = Patience()
    return _patience
