"""FSDP2 under thinwire: which modules are gathered, whole weights where nothing is trained, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import thinwire
from tests.workers import run_workers
from thinwire import ConfigError
from thinwire.compose import apply
from thinwire.layout.layers import layers_of
from thinwire.methods.data.fsdp import FSDP


class Stack(nn.Module):
    """Layers of an odd width in a ModuleList, and a frozen one in another."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 13)) for _ in range(3))
        self.frozen = nn.ModuleList([nn.Linear(13, 13).requires_grad_(False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.frozen[0](x).square().mean()


def test_children_of_the_outermost_lists_are_gathered_one_by_one() -> None:
    model = Stack()
    assert layers_of(model) == list(model.layers)
    assert layers_of(nn.Linear(2, 2)) == []
    # Nobody calls a list; and what lies inside a part is gathered with it.
    experts = nn.ModuleList(nn.ModuleList(Stack() for _ in range(2)) for _ in range(2))
    assert layers_of(nn.Sequential(experts)) == [expert for layer in experts for expert in layer.children()]


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + rank))


def train(rank: int, world_size: int, overlap: bool) -> tuple:
    model = Stack(seed=rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, sharded = apply(  # type: ignore[assignment]
        FSDP(),
        model,
        optimizer,
        local_size=1,
        seed=0,
        timeout_s=300,
        checked=True,
        overlap=overlap,
    )
    sent = []
    for step in range(5):
        before = sharded.meter.snapshot()
        with sharded.no_sync():
            (model(inputs(step, rank)[:2]) / 2).backward()
        (model(inputs(step, rank)[2:]) / 2).backward()
        sharded.clip_grad_norm_(0.1)
        sharded.step()
        sharded.zero_grad()
        if not overlap:
            sent.append((sharded.meter.snapshot() - before).sent_bytes)
    sharded.synchronize()
    # From here on a rank may call the model alone.
    with torch.no_grad():
        losses = [float(model(inputs(step, rank))) for step in range(1 + 2 * rank)]
    assert sharded.all_mean(rank) == (world_size - 1) / 2
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, losses, sent, sharded.bytes_per_step, dict(row[:2] for row in sharded.describe())


@pytest.mark.parametrize("overlap", [True, False])
def test_layers_follow_a_single_process(overlap: bool) -> None:
    reference = Stack(seed=0)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    for step in range(5):
        (reference(inputs(step, 0)) / 2 + reference(inputs(step, 1)) / 2).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for weights, losses, sent, formula, described in run_workers(train, 2, overlap):
        for name, weight in reference.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=0, atol=2e-6)
        assert losses[0] == pytest.approx(reference(inputs(0, len(losses) // 2)).item(), rel=1e-4)
        assert set(sent[1:]) in ({formula}, set())
        assert described["FSDP2 modules"] == "the root and 3 x Sequential"


def twice(rank: int, world_size: int) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = apply(FSDP(),   # type: ignore[assignment]
        model, torch.optim.SGD(model.parameters(), lr=0.1), local_size=1, seed=0, timeout_s=300, checked=False,
        overlap=True,
    )  # fmt: skip
    for _ in range(2):
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
    # The mean over ranks, twice, of four rows of 1 or 2 and a bias of 1.
    assert float(optimizer.clip_grad_norm_(100.0)) == pytest.approx(2 * (16 * 1.5**2 + 4) ** 0.5)


def test_a_second_reduction_adds_to_the_first() -> None:
    run_workers(twice, 2)


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    def fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
        return apply(FSDP(), model, optimizer, local_size=1, seed=0, timeout_s=300, checked=False, overlap=True)

    found: dict[str, str] = {}
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    other = nn.Linear(4, 4)
    for name, net, optimizer in (
        ("scalar", scalar, torch.optim.SGD(scalar.parameters(), lr=0.1)),
        ("muon", other, torch.optim.Muon([other.weight])),
        ("adafactor", other, torch.optim.Adafactor(other.parameters())),
    ):
        with pytest.raises(ConfigError) as caught:
            fresh(net, optimizer)
        found[name] = str(caught.value)
    return found


def test_mistakes_are_refused_with_the_way_out() -> None:
    for found in run_workers(mistakes, 2):
        assert "'scale' is a scalar" in found["scalar"]
        assert "not in the optimizer" in found["muon"]
        assert "can't be sharded" in found["adafactor"]


def offloaded(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Weights after two steps, with and without torch's policy that keeps shards with the host."""
    found, mesh = [], init_device_mesh("cpu", (world_size,))
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 64))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compressed = thinwire.compress_fsdp(model, thinwire.ZeroPP(), optimizer, announce=False)
        for step in range(2):
            model(inputs(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: param.full_tensor().clone() for name, param in model.named_parameters()})  # type: ignore[attr-defined]
        compressed.close()
    return found


def test_torchs_offload_policy_changes_no_bit() -> None:
    for plain, away in run_workers(offloaded, 2):
        assert all(torch.equal(away[name], value) for name, value in plain.items())
