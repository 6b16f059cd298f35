"""A dead, frozen or confused peer is named by every survivor, within the timeout."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers import HANG_S, run_workers
from thinwire.codecs import Identity
from thinwire.collectives import Communicator, patience
from thinwire.errors import MismatchError, PeerLostError


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_rank_goes(rank: int, world_size: int, local_size: int, how: int, timeout_s: float) -> tuple[str, list[str]]:
    patience.FIRST_S, patience.LOOK_EVERY_S = 0.5, 0.1
    said = Said()
    patience.log.addHandler(said)
    comm = Communicator(local_size=local_size, timeout_s=HANG_S)
    x = torch.ones(1 << 12)
    comm.wait(comm.reduce_scatter(x, Identity()))
    # All have come by now.
    comm._wire.timeout_s = timeout_s
    if rank == 2:
        os.kill(os.getpid(), how)
    with pytest.raises(PeerLostError) as caught:
        while True:
            comm.wait(comm.reduce_scatter(x, Identity()))
    with pytest.raises(PeerLostError):
        comm.wait(comm.all_gather(x, Identity()))
    time.sleep(1.0)
    return str(caught.value), [line for line in said.lines if "has waited" in line]


def test_a_wait_that_is_no_fault_says_why() -> None:
    wire: Any = SimpleNamespace(rank=1, timeout_s=9.0, global_ranks=[0, 1], name="rank {}".format, store=dist.HashStore)
    said, watch = list[str](), patience.Patience()
    watch.announce = said.append
    one = patience.LongWait(wire, 0, "gather 4", 0.0, 1.0)
    with watch.because("rank 0 measures"):
        watch._tell(one, 31.0)
    watch._tell(one, 62.0)
    assert "has waited 31 s for rank 0 (gather 4), because rank 0 measures; after 9 s" in said[0]
    assert "because" not in said[1]


@pytest.mark.parametrize("local_size", [1, 2, 4])
@pytest.mark.parametrize(("how", "timeout_s"), [(signal.SIGKILL, HANG_S), (signal.SIGSTOP, 5.0)])
def test_survivors_name_the_missing_rank(local_size: int, how: int, timeout_s: float) -> None:
    # A rank that is killed is noticed at once, one that is stopped only after the time limit.
    results = run_workers(one_rank_goes, 4, local_size, how, timeout_s, may_die=(2,))
    for rank in (0, 1, 3):
        message, _ = results[rank]
        assert "rank 2 is missing" in message, message
        assert "reduce_scatter" in message
    told = [line for rank in (0, 1, 3) for line in results[rank][1]]
    # While they wait, too: of the rank itself, or through the others that wait for it.
    assert how == signal.SIGKILL or any(re.search(r"waits? for rank 2 \(|s for rank 2 \(", line) for line in told), told


def disagree(rank: int, world_size: int) -> str:
    comm = Communicator(local_size=1, timeout_s=10, checked=True)
    comm.wait(comm.all_gather(torch.ones(8), Identity()))
    with pytest.raises((MismatchError, PeerLostError)) as caught:
        comm.wait(comm.all_gather(torch.ones(8 if rank == 0 else 16), Identity()))
    return str(caught.value)


def test_checked_mode_shows_both_sides() -> None:
    messages = run_workers(disagree, 2)
    assert "rank 0 expects message 2 of all_gather/inter with 32 bytes" in messages[0]
    assert "rank 1 sends message 2 of all_gather/inter with 64 bytes" in messages[0]
    assert "rank 1 expects message 2 of all_gather/inter with 64 bytes" in messages[1]


def other_operation(rank: int, world_size: int) -> str:
    comm = Communicator(local_size=1, timeout_s=10, checked=True)
    with pytest.raises((MismatchError, PeerLostError)) as caught:
        if rank == 0:
            comm.wait(comm.all_gather(torch.ones(8), Identity()))
        else:
            comm.wait(comm.reduce_scatter(torch.ones(16), Identity()))
    return str(caught.value)


def test_checked_mode_names_both_operations() -> None:
    messages = run_workers(other_operation, 2)
    assert any("all_gather/inter" in message and "reduce_scatter/inter" in message for message in messages)
