"""A gather through the ranks' store, which names a rank that stays silent."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from thinwire import _compat
from thinwire.errors import PeerLostError

T = TypeVar("T")
POLL_S = 0.02


def of_all_ranks(mine: T, what: str) -> list[T]:
    """What every rank of the default group states, in rank order; see `gather`."""
    return gather(_compat.default_store(), dist.get_rank(), dist.get_world_size(), mine, what)


def told_by_first(mine: T, what: str) -> T:
    """What rank 0 states; every rank of the default group calls it."""
    return of_all_ranks(mine, what)[0]


def gather(store: dist.Store, rank: int, world_size: int, mine: T, what: str) -> list[T]:
    """What every rank states, in rank order. All of them call it as often, and in the same order.

    what: the purpose, for the message. Raises PeerLostError, which names the ranks that have not come within the
    store's timeout, and since when they are waited for.
    """
    return gather_among(store, range(world_size), rank, mine, what, _compat.timeout_of(store))


def gather_among(store: dist.Store, ranks: Sequence[int], rank: int, mine: T, what: str, timeout_s: float) -> list[T]:
    """As `gather`, for these ranks alone; rank: this one's number in the world. Each set of ranks counts its calls."""
    start, key = time.time(), tell(store, rank, mine)
    silent = set(ranks)
    while silent := {other for other in silent if not store.check([key(other)])}:
        if time.time() > start + timeout_s:
            since = time.strftime("%H:%M:%S", time.localtime(start))
            raise PeerLostError(
                f"rank {', '.join(map(str, sorted(silent)))} is silent at the start of the run: rank {rank} waits for "
                f"{what} since {since}, longer than {timeout_s:g} s"
            )
        time.sleep(POLL_S)
    return [pickle.loads(bytes.fromhex(store.get(key(other)).decode())) for other in ranks]


def tell(store: dist.Store, rank: int, mine: object) -> Callable[[int], str]:
    """State this rank's part of the next `gather_among`. Return the key under which a rank states its part.

    A rank that does not wait for the others' parts calls nothing else.
    """
    key = f"thinwire/gather/{store.add(f'thinwire/gathers/{rank}', 1)}/{{}}".format
    store.set(key(rank), pickle.dumps(mine).hex())
    return key
