"""Ranks that meet again after losses: all of them, in the newest incarnation, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from thinwire.collectives import incarnations
from thinwire.collectives.incarnations import HERE, Incarnations, connect, end, is_awaited, watched
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
    assert is_awaited(host, 1) == (0, False), "nobody waits"
    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(met, ranks)) == [0, 0, 0]
        # Ranks 0 and 2 miss rank 1; nothing comes to pass without it.
        waiting = [pool.submit(met, ranks[rank]) for rank in (0, 2)]
        while not host.check([HERE.format(1, 0), HERE.format(1, 2)]):
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
    end(host, "rank 0 has failed, for want of rank 1")
    with pytest.raises(PeerLostError, match="rank 1 has failed, and is not started again"):
        Incarnations(host, 0, 2, 20).meet()


def test_ranks_wait_for_as_long_as_a_launcher_says_that_the_missing_one_runs(
    host: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, timeout_s = range(1, 8), 10.0
    passed: list[float] = []

    def sleep(seconds: float) -> None:
        passed.append(0.9 * timeout_s)
        if len(passed) in told:
            watched(host, 1)

    monkeypatch.setattr(incarnations, "time", SimpleNamespace(monotonic=lambda: sum(passed), sleep=sleep))
    with pytest.raises(PeerLostError, match=r"rank 1 did not come back in 10 s"):
        Incarnations(host, 0, 2, timeout_s).meet()
    assert len(passed) == len(told) + 2
