"""A fixed number of ranks that meet again after a loss: one incarnation of their group after another."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import PeerLostError, ThinwireError

POLL_S = 0.05
CURRENT = "thinwire/incarnation"
BEGUN = "thinwire/incarnation/{}/begun"
HERE = "thinwire/incarnation/{}/{}"
WATCHED = "thinwire/watched/{}"
OVER = "thinwire/over"


def connect(meet: str, timeout_s: float) -> dist.TCPStore:
    """The store at HOST:PORT, in which ranks meet. Raises ThinwireError if it does not answer."""
    host, _, port = meet.rpartition(":")
    try:
        return dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        raise ThinwireError(f"the meeting of the ranks at {meet} can't be reached: {error}") from None


class Incarnations:
    """The meetings of a rank with the others, in a store that outlives all of them.

    An incarnation is the group from one loss to the next. A rank that misses another asks for the next incarnation, and
    so does a process that is started in the place of a lost one. All ranks follow the newest number, so that several
    losses at once end in one incarnation. Messages of an older one never reach it: it has other process groups.

    Args:
        store: shared by all ranks. It must not be hosted by one of them.
        timeout_s: how long a meeting waits for a rank that no launcher reports as `watched`.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self.number = -1

    def meet(self) -> dist.Store:
        """Wait until all ranks have come to the next incarnation. Return a store for it alone.

        A rank may take its time for as long as its launcher says `watched`. Raises PeerLostError with the ranks of
        which nothing was heard for the timeout, or if `end` was called.
        """
        self._ask()
        heard: dict[int, tuple[int, float]] = {}
        while True:
            number = self._current()
            self._store.set(BEGUN.format(number), "")
            self._store.set(HERE.format(number, self._rank), "")
            while self._current() == number:
                ranks = range(self._world_size)
                silent = [rank for rank in ranks if not self._store.check([HERE.format(number, rank)])]
                if not silent:
                    self.number = number
                    return dist.PrefixStore(f"thinwire/incarnation/{number}", self._store)
                if self._store.check([OVER]):
                    raise PeerLostError(self._store.get(OVER).decode())
                now = time.monotonic()
                for rank in silent:
                    told = self._store.add(WATCHED.format(rank), 0)
                    if heard.get(rank, (-1, now))[0] != told:
                        heard[rank] = told, now
                if gone := [rank for rank in silent if now > heard[rank][1] + self._timeout_s]:
                    names = ", ".join(map(str, gone))
                    raise PeerLostError(f"rank {names} did not come back in {self._timeout_s:g} s")
                time.sleep(POLL_S)

    def _ask(self) -> None:
        """Ask for an incarnation after the one that this rank was in; the first processes of all ranks share one."""
        if self.number >= 0:
            self._store.compare_set(CURRENT, str(self.number), str(self.number + 1))
        elif self._store.add(f"thinwire/came/{self._rank}", 1) > 1:
            self._store.add(CURRENT, 1)

    def _current(self) -> int:
        return self._store.add(CURRENT, 0)


def is_awaited(store: dist.Store, rank: int) -> tuple[int, bool]:
    """The number of the newest incarnation, and whether a rank has not come to it while another waits there."""
    number = store.add(CURRENT, 0)
    return number, store.check([BEGUN.format(number)]) and not store.check([HERE.format(number, rank)])


def watched(store: dist.Store, rank: int) -> None:
    """Tell waiting ranks to keep waiting for this one: it runs, and its launcher restarts it if it hangs."""
    store.add(WATCHED.format(rank), 1)


def end(store: dist.Store, why: str) -> None:
    """Tell all ranks that wait for others to give up: one of the others does not come back."""
    # The first reason is the one to tell: the others fail because of it.
    store.compare_set(OVER, "", why)
