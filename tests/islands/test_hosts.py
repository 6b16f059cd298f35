"""Weights that are handed to an inner strategy are its weights from then on: masters, replicas, references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.strategy_suite import Net, batch, hash_of
from tests.workers import run_workers
from thinwire.compose import apply
from thinwire.hosts.interface import ParallelOptimizer
from thinwire.registry import strategy_named

# Those that go on, bit for bit, as a fresh start with the same number of steps does.
EXACT = ("ddp", "zero", "sdp4bit", "fsdp")
# How far the loss may be from that of the exact weights: compute weights may travel in 8 or 16 bits.
INNER = {"ddp": 1e-6, "zero": 1e-6, "zero-bf16": 0.01, "sdp4bit": 0.01, "zero-compressed": 0.01, "fsdp": 1e-6,
         "fsdp-bf16": 0.01, "zeropp": 0.05, "frontier": 0.05}  # fmt: skip


def applied(name: str, seed: int, local_size: int = 1) -> tuple[Net, nn.Module, ParallelOptimizer]:
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = strategy_named(name)
    wrapped, parallel = apply(
        strategy, model, optimizer, local_size=local_size, seed=0, timeout_s=300, checked=True, overlap=True
    )
    return model, wrapped, parallel


def step(wrapped: nn.Module, optimizer: ParallelOptimizer, number: int, rank: int, world_size: int) -> None:
    wrapped(batch(number).chunk(world_size)[rank], True).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def hand_over(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name in INNER:
        local_size = 2 if name in ("frontier", "zeropp") else 1
        model, wrapped, optimizer = applied(name, seed=0, local_size=local_size)
        names = trained(model)
        assert all(torch.equal(v, dict(Net(0).named_parameters())[n]) for n, v in optimizer.masters(names).items())
        for number in range(3):
            step(wrapped, optimizer, number, rank, world_size)
        optimizer.synchronize()
        before = optimizer.meter.snapshot()
        values = optimizer.masters(names[1:])
        read = (optimizer.meter.snapshot() - before).sent_bytes
        values = {
            n: v + 0.01 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for n, v in values.items()
        }
        before = optimizer.meter.snapshot()
        optimizer.adopt_weights(values)
        # What a module asks for next is counted with the step.
        if name == "fsdp" or name == "fsdp-bf16":
            optimizer.synchronize()
        wrote = (optimizer.meter.snapshot() - before).sent_bytes
        assert (read, wrote) == optimizer.handover_bytes(names[1:]), name
        again = optimizer.masters(names)
        assert all(torch.equal(again[n], value) for n, value in values.items()), name
        optimizer.synchronize()
        plain = Net(0)
        plain.load_state_dict(again | {n: p for n, p in plain.state_dict().items() if n not in again}, strict=False)
        with torch.no_grad():
            loss, reference = float(model(batch(9), True)), float(plain(batch(9), True))
        optimizer.adopt_weights(again)
        step(wrapped, optimizer, 3, rank, world_size)
        optimizer.synchronize()
        went_on = hash_of(model)
        optimizer.check_replicas()
        fresh_hash = ""
        if name in EXACT:
            fresh, fresh_wrapped, other = applied(name, seed=1)
            other.adopt_weights(again)
            fresh.fixed.load_state_dict(model.fixed.state_dict())
            other.steps = optimizer.steps - 1
            step(fresh_wrapped, other, 3, rank, world_size)
            other.synchronize()
            fresh_hash = hash_of(fresh)
            other.close()
        optimizer.close()
        found[name] = loss, reference, went_on, fresh_hash
    return found


@pytest.mark.parametrize("world_size", [2])
def test_adopted_weights_are_the_weights(world_size: int) -> None:
    results = run_workers(hand_over, world_size)
    for found in results:
        for name, (loss, reference, went_on, fresh) in found.items():
            assert loss == pytest.approx(reference, rel=INNER[name]), name
            assert went_on == results[0][name][2], name
            assert name not in EXACT or went_on == fresh, name
