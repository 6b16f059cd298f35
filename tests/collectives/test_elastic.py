"""Islands come, die, freeze and come back; who stays goes on with a communicator over those present."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.workers import run_workers
from thinwire.codecs import Identity
from thinwire.collectives import ElasticPeers, Membership, faults, host_meeting
from thinwire.errors import ConfigError, PeerLostError, ThinwireError

TIMEOUT_S = 3.0


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
    peers.close()
    return counts


def test_generations_leave_no_socket_and_no_thread() -> None:
    meeting = host_meeting()
    for counts in run_workers(renew_again_and_again, 2, f"127.0.0.1:{meeting.port}"):
        assert counts[1:] == [counts[1]] * 4, counts


def live(peers: ElasticPeers, last: int) -> list[Membership]:
    """Talk to the others and renew when they change, until three are in generation `last`; the generations seen."""
    seen, due = [peers.membership], time.monotonic() + 60
    while len(peers.members) < 3 or peers.generation < last:
        assert time.monotonic() < due, peers.membership
        try:
            assert gathered(peers) == list(peers.members)
            peers.has_state = True
            if not peers.changed():
                faults.at_step(peers.generation)
                time.sleep(0.05)
                continue
        except PeerLostError as error:
            assert "island" in str(error)
        peers.renew()
        seen.append(peers.membership)
    return seen


def kill_freeze_and_return(rank: int, world_size: int, meet: str) -> list[Membership]:
    """In generation 1 island 2 is killed, in 2 it is gone, in 3 it is back, when 1 freezes; 1 is away and back."""
    told = ["kill rank=2 step=1", "freeze rank=1 step=3 seconds=8"]
    faults.arm(map(faults.parse, told), rank=rank, announce=lambda message: None)
    if rank == 3:
        time.sleep(12.0)
    peers = ElasticPeers(meet, min(rank, 2), timeout_s=TIMEOUT_S, max_islands=3, min_islands=3 if rank < 3 else 1)
    seen = live(peers, last=5)
    assert gathered(peers) == [0, 1, 2]
    peers.close()
    return seen


def test_the_killed_and_the_frozen_are_missed_and_come_back() -> None:
    meeting = host_meeting()
    first, frozen, _, back = run_workers(
        kill_freeze_and_return, 4, f"127.0.0.1:{meeting.port}", may_die=(2,), timeout_s=80
    )
    told = [(one.members, one.joined, one.lost) for one in first]
    assert told == [
        ((0, 1, 2), (), ()), ((0, 1), (), (2,)), ((0, 1, 2), (2,), ()), ((0, 2), (), (1,)), ((0, 1, 2), (1,), ()),
    ]  # fmt: skip
    assert [one.generation for one in first] == [1, 2, 3, 4, 5]
    assert [one.generation for one in back] == [3, 4, 5] and [one.generation for one in frozen] == [1, 2, 3, 5]
    print([one.cost_s for one in first])


def test_what_cannot_meet_is_told() -> None:
    meeting = host_meeting()
    with pytest.raises(ConfigError, match=f"port {meeting.port} can't host"):
        host_meeting(meeting.port)
    with pytest.raises(ConfigError, match="island 3"):
        ElasticPeers("127.0.0.1:1", 3, max_islands=2)
    with pytest.raises(ThinwireError, match=r"can't reach the meeting of the islands at 127\.0\.0\.1:1"):
        ElasticPeers("127.0.0.1:1", 0, timeout_s=0.5)


def goes_on_without_the_meeting(rank: int, world_size: int, meet: str) -> bool:
    if rank == 2:
        with suppress(ConfigError):
            held = host_meeting(int(meet.rpartition(":")[2]))
            time.sleep(6.0)
            del held
        return True
    time.sleep(0.5)
    peers = ElasticPeers(meet, rank, timeout_s=TIMEOUT_S, max_islands=2, min_islands=2)
    time.sleep(8.0)
    assert gathered(peers) == [0, 1] and not peers.changed()
    with pytest.raises(ThinwireError, match="can't reach the meeting"):
        peers.renew()
    return True
