"""Faults are read, befall the right process at the right moment, once, and damage is noticed."""

from __future__ import annotations

import time

import pytest
import torch

from tests.workers import run_workers
from thinwire.codecs import Identity
from thinwire.collectives import Communicator, faults, gather as gathering
from thinwire.collectives.faults import Fault, parse
from thinwire.errors import ConfigError, CorruptMessageError, PeerLostError


@pytest.mark.parametrize(
    "text",
    [
        "kill rank=2 step=40",
        "freeze rank=1 step=10 seconds=10",
        "corrupt island=1 step=20 operation=outer",
        "drop rank=0 operation=outer",
        "delay rank=1 island=2 operation=outer seconds=0.5",
    ],
)
def test_a_fault_is_read_and_shown(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no fault is called ''"),
        ("kil rank=2 step=40", "did you mean 'kill'"),
        ("explode everything", "no fault is called 'explode'; choose one of corrupt, delay"),
        ("kill everything", "'everything' is not NAME=VALUE, such as step=10"),
        ("kill step=40", "say which process"),
        ("kill rank=2", "say when"),
        ("kill rank=2 steps=40", "did you mean 'step'"),
        ("kill rank=two step=4", "rank must be a number, not 'two'"),
        ("kill rank=2 step=0", "step must be at least 1"),
        ("kill rank=2 step=4 seconds=1", "a kill has no seconds"),
        ("freeze rank=2 step=4", "needs seconds"),
        ("delay rank=2 step=4 seconds=nan", "seconds must be above 0"),
        ("corrupt rank=2 step=4", "say which message it hits"),
    ],
)
def test_a_fault_that_could_not_fire_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse(text)


def test_it_fires_once_at_its_step_and_is_announced() -> None:
    said: list[str] = []
    asked = [Fault("delay", rank=0, step=2, seconds=0.01), Fault("delay", rank=1, step=1, seconds=0.01)]
    assert faults.arm(asked, rank=0, announce=said.append) == asked[:1]
    faults.at_step(1)
    assert not said and faults.are_armed()
    faults.at_step(2)
    faults.at_step(2)
    assert said == ["thinwire: fault injected in step 2: delay rank=0 step=2 seconds=0.01"]
    assert not faults.are_armed() and faults.disarm() == []


def test_a_message_is_damaged_in_a_copy_or_dropped() -> None:
    message = torch.arange(7, dtype=torch.uint8)
    faults.arm(map(parse, ["drop rank=0 operation=outer step=2", "corrupt rank=0 operation=outer step=2"]), rank=0)
    faults.at_step(1)
    assert faults.on_message("outer", message) is message
    faults.at_step(3)
    assert faults.on_message("other", message) is message
    assert faults.on_message("outer", message) is None
    damaged = faults.on_message("outer", message)
    assert damaged is not None and (damaged != message).sum() == 1 and message.tolist() == list(range(7))
    faults.disarm()


def one_after_another(rank: int, world_size: int) -> list[str]:
    """Every fault of a message that leaves the group usable, then one that does not; what this rank saw."""
    # The last one waits for what never comes.
    comms = [*[Communicator(local_size=1, checked=True)] * 2, Communicator(local_size=1, timeout_s=3, checked=True)]
    seen = []
    told = ["corrupt rank=1 operation=all_gather step=1", "delay rank=1 operation=all_gather step=2 seconds=0.2",
            "drop rank=1 operation=all_gather step=3"]  # fmt: skip
    faults.arm(map(parse, told), rank=rank, announce=lambda message: None)
    for step, comm in enumerate(comms, start=1):
        faults.at_step(step)
        try:
            comm.wait(comm.all_gather(torch.ones(8) * rank, Identity()))
            # Ranks still agree on what comes next.
            seen.append("fine" if comm.wait(comm.all_gather_exact(torch.tensor(rank))).tolist() == [0, 1] else "wrong")
        except (CorruptMessageError, PeerLostError) as error:
            seen.append(str(error))
            if isinstance(error, CorruptMessageError):
                assert error.sender == 1
                assert comm.wait(comm.all_gather_exact(torch.tensor(rank))).tolist() == [0, 1]
    return seen


def test_damage_is_noticed_and_named_and_the_group_goes_on() -> None:
    first, second = run_workers(one_after_another, 2)
    assert "all_gather/inter (message 1) from rank 1 to rank 0 has another checksum" in first[0]
    assert second[0] == "fine"
    assert first[1] == second[1] == "fine"
    assert "rank 1 is missing: all_gather" in first[2] or "rank 0 is missing" in second[2]


def damaged_in_turns(rank: int, world_size: int) -> str:
    """A large message is damaged in the first of two turns."""
    gathering.LARGE_BYTES = 1
    comm = Communicator(local_size=1, checked=True)
    faults.arm([parse("corrupt rank=1 operation=outer")], rank=rank, announce=lambda message: None)
    packet = torch.full((64,), rank, dtype=torch.uint8)

    def gather() -> list[int]:
        done = comm.submit(lambda link: gathering.all_gather_packets(link, packet, "outer", in_turns=True))
        return comm.wait(done)[0, :, 0].tolist()

    told = "fine"
    try:
        assert gather() == [0, 1, 2]
    except CorruptMessageError as error:
        assert error.sender == 1 and comm.meter.snapshot().num_damaged == 1
        told = str(error)
    # All have ended in the same round, so the same job can be run again.
    assert gather() == [0, 1, 2]
    return told


def test_damage_in_one_of_several_turns_is_named_when_all_have_come() -> None:
    told = run_workers(damaged_in_turns, 3, local_size=1)
    assert told[:2] == ["fine", "fine"]
    assert "outer/inter (message 1) from rank 1 to rank 2 has another checksum" in told[2]


def frozen(rank: int, world_size: int) -> float:
    faults.arm([parse("freeze rank=0 step=1 seconds=0.5")], rank=rank, announce=lambda message: None)
    start = time.monotonic()
    faults.at_step(1)
    return time.monotonic() - start


def killed(rank: int, world_size: int) -> str:
    faults.arm([parse("kill rank=1 step=1")], rank=rank, announce=lambda message: None)
    faults.at_step(1)
    return "alive"


def test_a_frozen_process_thaws_and_a_killed_one_is_dead() -> None:
    (took_s,) = run_workers(frozen, 1)
    assert took_s >= 0.5
    assert run_workers(killed, 2, may_die=(1,)) == ["alive", None]
