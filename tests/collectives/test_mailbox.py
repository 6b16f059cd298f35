"""Letters between real processes: order, windows, bytes, damage, loss."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers import HANG_S, run_workers
from thinwire.collectives import Expected, Label, Mailbox, Topology, faults
from thinwire.errors import ConfigError, CorruptMessageError, MismatchError, PeerLostError

LABELS = [Label("forward", i, 0) for i in range(5)] + [Label("backward", i, 1) for i in range(5)]


def content(label: Label, step: int, num_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + LABELS.index(label))
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def num_bytes_of(label: Label) -> int:
    return 1000 + 400_000 * label.hop + label.micro_batch


def _in_any_order(rank: int, world_size: int, checked: bool) -> tuple[int, int, int]:
    mailbox = Mailbox(None, Topology(2, 1), checked=checked, window=3)
    # Rank 0 sends in reverse of the order in which rank 1 takes, and does not wait before its next step.
    for step in range(3):
        mailbox.begin([Expected(label, 0, num_bytes_of(label)) for label in LABELS] if rank else [])
        for label in reversed(LABELS) if not rank else ():
            mailbox.send(1, label, content(label, step, num_bytes_of(label)))
        for label in LABELS if rank else ():
            assert torch.equal(mailbox.take(label), content(label, step, num_bytes_of(label)))
        mailbox.finish()
    reading = mailbox.meter.snapshot()
    assert set(reading.operations) == {("pipeline_forward", "inter"), ("pipeline_backward", "inter")}
    mailbox.close()
    return reading.sent_bytes, reading.received_bytes, sum(r.calls for r in reading.operations.values())


@pytest.mark.parametrize("checked", [False, True])
def test_messages_come_in_any_order_and_are_counted(checked: bool) -> None:
    total = 3 * sum(map(num_bytes_of, LABELS))
    assert run_workers(_in_any_order, 2, checked) == [(total, 0, 30), (0, total, 30)]


def _damaged(rank: int, world_size: int) -> None:
    label = LABELS[0]
    mailbox = Mailbox(None, Topology(2, 1), checked=True)
    faults.arm([faults.parse("corrupt rank=0 operation=pipeline_forward")], rank=rank, announce=lambda _: None)
    mailbox.begin([Expected(label, 0, 100)] if rank else [])
    if rank:
        with pytest.raises(CorruptMessageError, match=r"pipeline_forward 0 at hop 0 .* from rank 0 to rank 1"):
            mailbox.take(label)
    else:
        mailbox.send(1, label, content(label, 0, 100))
    mailbox.finish()


def _sizes_that_disagree(rank: int, world_size: int) -> None:
    label = LABELS[0]
    # What rank 0 sends is never taken.
    mailbox = Mailbox(None, Topology(2, 1), timeout_s=HANG_S if rank else 3.0, checked=True)
    mailbox.begin([Expected(label, 0, 96)] if rank else [])
    if rank:
        with pytest.raises(MismatchError, match=r"rank 1 expects .* with 96 bytes, rank 0 sends .* with 100 bytes"):
            mailbox.take(label)
    else:
        mailbox.send(1, label, content(label, 0, 100))
        with pytest.raises(PeerLostError, match="rank 1"):
            mailbox.finish()


def test_damage_and_disagreement_are_noticed() -> None:
    run_workers(_damaged, 2)
    run_workers(_sizes_that_disagree, 2)


def _lost(rank: int, world_size: int) -> str | None:
    """Rank 2 dies; rank 0 waits for rank 1, which waits for rank 2."""
    label = LABELS[0]
    mailbox = Mailbox(None, Topology(3, 1))
    mailbox.begin([Expected(label, rank + 1, 8)] if rank < 2 else [])
    if rank == 2:
        # Who dies while others still connect is no lost peer to them.
        for other in range(2):
            dist.recv(torch.empty(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.ones(1), 2)
    try:
        mailbox.take(label)
    except PeerLostError as error:
        return str(error)
    return None


def test_who_is_really_missing_is_named() -> None:
    first, second, _ = run_workers(_lost, 3, may_die=(2,))
    assert "rank 2 is missing: pipeline_forward" in first
    assert "rank 2 is missing: pipeline_forward" in second


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="window 0"):
        Mailbox(None, Topology(1, 1), window=0)
