"""Islands come, die, freeze and come back; who stays goes on with a communicator over those present."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers import free_port, run_workers
from thinwire._compat.elastic import Rendezvous
from thinwire.codecs import Identity
from thinwire.collectives import ElasticPeers, elastic, host_meeting
from thinwire.errors import ConfigError, ThinwireError

# A busy machine may keep an island from its heartbeats for some seconds, and half of it is silence enough to be lost.
TIMEOUT_S = 10.0
# Where no timeout is waited for.
LONG_S = 60.0


def gathered(peers: ElasticPeers) -> list[int]:
    """Which islands answer, through the communicator."""
    return peers.comm.wait(peers.comm.all_gather_exact(torch.tensor([peers.island]))).flatten().tolist()


def open_things() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def renew_again_and_again(rank: int, world_size: int, meet: str) -> list[tuple[int, int]]:
    peers = ElasticPeers(meet, rank, timeout_s=TIMEOUT_S, max_islands=world_size, min_islands=world_size)
    counts = []
    for generation in range(1, 6):
        assert peers.generation == generation and peers.members == tuple(range(world_size))
        assert gathered(peers) == list(range(world_size))
        # Something is under way, and will never arrive on rank 0.
        hanging = peers.comm.all_gather(torch.ones(1 << 10), Identity()) if rank == 0 else None
        counts.append(open_things())
        peers.renew()
        if hanging is not None:
            assert isinstance(hanging.exception(timeout=1.0), RuntimeError)
    # Whoever leaves at once breaks connections that a slower one may still be making.
    gathered(peers)
    peers.close()
    return counts


def test_generations_leave_no_socket_and_no_thread() -> None:
    meeting = host_meeting()
    for counts in run_workers(renew_again_and_again, 2, f"127.0.0.1:{meeting.port}"):
        # What each generation leaves adds up; one socket may just be closing on a busy machine.
        assert all(last <= first + 1 for first, last in zip(counts[1], counts[-1], strict=True)), counts


def begins_with_a_slow_one(rank: int, world_size: int, meet: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    if rank == 1:
        # All have come, and those who have met have waited for others, before this one looks.
        meet_late(Rendezvous, 2 * elastic.LAST_CALL_S)
    peers = ElasticPeers(meet, rank, timeout_s=TIMEOUT_S, max_islands=4, min_islands=world_size)
    assert gathered(peers) == list(range(world_size))
    peers.close()
    return peers.generation, peers.members, peers.membership.joined


def meet_late(rendezvous: Any, delay_s: float) -> None:
    """The first meeting begins so much later."""
    meet = rendezvous.meet

    def late(self: Rendezvous) -> tuple[dist.Store, int, int]:
        time.sleep(delay_s)
        rendezvous.meet = meet
        return meet(self)

    rendezvous.meet = late


def test_the_first_generation_waits_for_a_slow_island() -> None:
    meeting = host_meeting()
    for begun in run_workers(begins_with_a_slow_one, 3, f"127.0.0.1:{meeting.port}"):
        assert begun == (1, (0, 1, 2), ())


def meets_with_one_that_dies(rank: int, world_size: int, meet: str, moment: str) -> tuple[tuple[int, ...], bool]:
    """Island 2 has come to the second generation, and dies at that moment; whether that took less than a timeout."""
    peers = ElasticPeers(meet, rank, timeout_s=LONG_S, max_islands=world_size, min_islands=world_size)
    if rank == 2:
        setattr(peers, moment, lambda *told: os.kill(os.getpid(), signal.SIGKILL))
    peers.renew()
    assert gathered(peers) == [0, 1]
    return peers.members, peers.membership.cost_s < LONG_S


def test_who_dies_while_the_others_meet_costs_them_less_than_a_timeout() -> None:
    def run(moment: str) -> list[Any]:
        meeting = host_meeting()
        return run_workers(meets_with_one_that_dies, 3, f"127.0.0.1:{meeting.port}", moment, may_die=(2,))

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, ("_introduce", "_connect_all")):
            assert found == [((0, 1), True)] * 2 + [None]


def test_what_cannot_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "CONNECT_S", 0.5)
    meeting = host_meeting()
    with pytest.raises(ConfigError, match=f"port {meeting.port} can't host"):
        host_meeting(meeting.port)
    with pytest.raises(ConfigError, match="island 3"):
        ElasticPeers("127.0.0.1:1", 3, max_islands=2)
    with pytest.raises(ThinwireError, match=r"can't reach the meeting of the islands at 127\.0\.0\.1:1"):
        ElasticPeers("127.0.0.1:1", 0, timeout_s=0.5)


def goes_on_without_the_meeting(rank: int, world_size: int, meet: str) -> str:
    if rank == 2:
        meeting = host_meeting(int(meet.rpartition(":")[2]))
        while meeting.add("met", 0) < 2:
            time.sleep(0.1)
        return ""
    peers = ElasticPeers(meet, rank, timeout_s=TIMEOUT_S, max_islands=2, min_islands=2)
    assert gathered(peers) == [0, 1]
    host, _, port = meet.rpartition(":")
    dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False).add("met", 1)
    time.sleep(TIMEOUT_S)
    assert gathered(peers) == [0, 1] and not peers.lost() and not peers.changed()
    with pytest.raises(ThinwireError) as caught:
        peers.renew()
    return str(caught.value)


def test_those_present_go_on_without_the_meeting_until_the_next_change() -> None:
    meet = f"127.0.0.1:{free_port()}"
    first, second, _ = run_workers(goes_on_without_the_meeting, 3, meet, may_die=(2,))
    assert f"island 0 can't reach the meeting of the islands at {meet}" in first
    assert f"island 1 can't reach the meeting of the islands at {meet}" in second
