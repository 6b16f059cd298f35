"""Ranks that meet again after losses: all of them, in the newest incarnation, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from thinwire.collectives.incarnations import Incarnations, connect, end, is_awaited
from thinwire.errors import PeerLostError

RANKS = 3


@pytest.fixture
def host() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_ranks_meet_in_the_newest_incarnation(host: dist.TCPStore) -> None:
    def made(rank: int) -> Incarnations:
        return Incarnations(connect(f"127.0.0.1:{host.port}", 20), rank, RANKS, 20)

    def met(one: Incarnations) -> int:
        one.meet().set("there", "")
        return one.number

    ranks = [made(rank) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(met, ranks)) == [0, 0, 0]
        # Ranks 0 and 2 miss rank 1; nothing comes to pass without it.
        waiting = [pool.submit(met, ranks[rank]) for rank in (0, 2)]
        while is_awaited(host, 0) != (1, False) or is_awaited(host, 2) != (1, False):
            pass
        assert is_awaited(host, 1) == (1, True) and not any(one.done() for one in waiting)
        # Started again, it asks for an incarnation of its own, to which those that wait follow.
        ranks[1] = made(1)
        assert met(ranks[1]) == 2 and [one.result() for one in waiting] == [2, 2]
        # Ranks that notice a loss at different times still meet once.
        assert list(pool.map(met, reversed(ranks))) == [3, 3, 3]


def test_ranks_that_wait_for_one_that_does_not_come_say_so(host: dist.TCPStore) -> None:
    alone = Incarnations(host, 0, 2, 0.2)
    with pytest.raises(PeerLostError, match=r"rank 1 did not come back in 0.2 s"):
        alone.meet()
    end(host, "rank 1 has failed, and is not started again")
    with pytest.raises(PeerLostError, match="is not started again"):
        Incarnations(host, 0, 2, 20).meet()
