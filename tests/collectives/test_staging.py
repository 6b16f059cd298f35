"""The way of CUDA tensors, on a machine that has none: forced on CPU tensors, as a device whose copies come late."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.collectives.test_algorithms import all_operations
from tests.workers import run_workers
from thinwire.collectives import staging
from thinwire.collectives.rounds import Rounds
from thinwire.compose import apply
from thinwire.errors import ConfigError
from thinwire.registry import strategy_named
from thinwire.state.replicas import check_device


class LateDevice:
    """Copies to the host are made when their end is waited for, and not before: who sends at once sends rubbish."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.num_copies = 0

    def to_host(self, message: Tensor, held: Tensor) -> None:
        held.view(torch.uint8).fill_(255)
        self.queue.append((message, held))
        self.num_copies += 1

    def queued(self) -> list[staging.Awaited]:
        copies, self.queue = self.queue, []
        return [Copies(copies)]


class Copies:
    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self.copies = copies

    def wait(self) -> None:
        for message, held in self.copies:
            held.copy_(message)


def stage_everything() -> LateDevice:
    """From here on this process takes every tensor for one on a device."""
    device = LateDevice()
    for name, stand_in in (("must_stage", lambda tensor: True), ("to_host", device.to_host), ("queued", device.queued)):
        setattr(staging, name, stand_in)
    return device


def operations(rank: int, world_size: int, local_size: int) -> tuple[int, list[dict], list[dict]]:
    plain = [all_operations(rank, world_size, local_size, checked) for checked in (False, True)]
    device = stage_everything()
    staged = [all_operations(rank, world_size, local_size, checked) for checked in (False, True)]
    return device.num_copies, plain, staged


def test_staged_messages_give_the_same_bits() -> None:
    for copies, plain, staged in run_workers(operations, 4, 2, local_size=2):
        assert copies > 0
        for one, other in zip(plain, staged, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)


STRATEGIES = ("zero", "sdp4bit", "ddp-bf16", "powersgd", "fsdp-bf16", "zeropp")


Ends = dict[str, tuple[list[Tensor], int]]


def train_all(rank: int) -> Ends:
    """Weights and bytes after four steps of every strategy; powersgd compresses in the last two."""
    ends = {}
    for name in STRATEGIES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))
        strategy = strategy_named(name, **({"start_step": 2} if name == "powersgd" else {}))
        wrapped, optimizer = apply(strategy,
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), local_size=1, seed=1, timeout_s=300, checked=False,
            overlap=False,
        )  # fmt: skip
        for step in range(4):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [value for name, value in optimizer.state_dict()["tensors"].items() if name.startswith("weights/")]
        ends[name] = weights, optimizer.meter.snapshot().sent_bytes
        optimizer.close()
    return ends


def train_both_ways(rank: int, world_size: int) -> tuple[int, Ends, Ends]:
    plain, device = train_all(rank), stage_everything()
    staged = train_all(rank)
    return device.num_copies, plain, staged


def test_every_strategy_trains_the_same_through_staging() -> None:
    for copies, expected, results in run_workers(train_both_ways, 2, local_size=1):
        assert copies > 0
        for name in STRATEGIES:
            assert expected[name][1] == results[name][1]
            assert all(torch.equal(a, b) for a, b in zip(expected[name][0], results[name][0], strict=True)), name


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="meta"):
        staging.must_stage(torch.empty(3, device="meta"))
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(ConfigError, match="'weight' has no shape yet: call the model once on a batch"):
        check_device(dict(nn.LazyLinear(2).named_parameters()))
    with pytest.raises(ConfigError, match=r"'weight' is on device meta: it must be materialised"):
        thinwire.zero(model, torch.optim.SGD(model.parameters(), lr=0.1), thinwire.SDP4Bit())


class Stream:
    """A stand-in for a CUDA stream, its events and the context it is current in, that writes down what happens."""

    def __init__(self, log: list[str]) -> None:
        self.device, self.log = torch.device("cuda", 0), log

    def wait_event(self, event: object) -> None:
        self.log.append(f"waits for {event}")

    def __enter__(self) -> None:
        self.log.append("enters")

    def __exit__(self, *_: object) -> None:
        self.log.append("leaves")

    def wait(self) -> None:
        self.log.append("is waited for")


def drive(rounds: Rounds) -> object:
    """The job's end, as the communication thread would drive it."""
    try:
        while True:
            for arrival in next(rounds):
                arrival.wait()
    except StopIteration as end:
        return end.value


def test_a_job_runs_beside_its_origin_and_ends_after_its_device_work(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    side = Stream(log)
    monkeypatch.setattr(staging, "side_stream", lambda device, slot: side)
    monkeypatch.setattr(staging, "unfinished", lambda stream: [stream])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def job() -> Rounds[str]:
        log.append("encodes")
        yield []
        log.append("decodes")
        return "sum"

    origin = staging.OriginStream(cast(Any, Stream([])), cast(Any, "backward"))
    assert drive(staging.beside(job(), origin, slot=0)) == "sum"
    inside = ["enters", "encodes", "leaves", "enters", "decodes", "leaves"]
    assert log == ["waits for backward", *inside, "is waited for"]


def test_a_failed_arrival_reaches_the_job_beside_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Stream([])
    monkeypatch.setattr(staging, "side_stream", lambda device, slot: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def job() -> Rounds[None]:
        yield []

    rounds = staging.beside(job(), staging.OriginStream(cast(Any, side), cast(Any, "backward")), slot=0)
    next(rounds)
    with pytest.raises(RuntimeError, match="lost"):
        rounds.throw(RuntimeError("lost"))
    assert side.log[-1] == "leaves"


def test_without_cuda_nothing_is_in_between() -> None:
    assert staging.OriginStream.here() is None
    assert staging.queued() == []
    assert not staging.must_stage(torch.zeros(1))
