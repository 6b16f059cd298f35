"""Islands whose model torch shards, by tensor parallelism or FSDP2: the same training as islands of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire
from tests.workers import run_workers
from thinwire.collectives import WorldPeers
from thinwire.errors import ConfigError

STEPS = 10
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "diloco": (thinwire.DiLoCo, {"sync_every": 4}),
    "streaming": (thinwire.StreamingDiLoCo,
                  {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1, "mix": 0.5, "codec": "fp32"}),
    "corrected": (thinwire.LocalSGD, {"sync_every": 4, "fedspeed": 10.0}),
}  # fmt: skip


class Net(nn.Module):
    """Two layers in a ModuleList, whose widths divide by two; 7 inputs do not."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(7, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def plain(model: Net, mesh: DeviceMesh) -> None:
    pass


def tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp2(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


SHARDINGS = {"tensor": tensor_parallel, "fsdp2": fsdp2}


def train(name: str, island: int, shard: Any, mesh: DeviceMesh, **around: Any) -> dict[str, Tensor]:
    make, options = METHODS[name]
    model = Net()
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with make(model, optimizer, **options, **around, announce=False) as islands:
        before = islands.meter.snapshot().sent_bytes
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + island)
            x = torch.randn(4, 7, generator=generator)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert islands.meter.snapshot().sent_bytes > before
        with islands.outer_parameters():
            outer = model.first.weight.detach().clone()
        assert outer.shape == (8, 7)
    named = {name: p.detach() for name, p in model.named_parameters()}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}


def grid(rank: int, world_size: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "tensor"))
    island, tensor = mesh["island"].get_local_rank(), mesh["tensor"]
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name in METHODS:
        # On ranks 0 and 2, and again on 1 and 3: two islands of one process.
        found[name, "whole"] = train(name, island, plain, tensor, peers=WorldPeers(mesh["island"]))
        for kind, shard in SHARDINGS.items():
            peers = WorldPeers(mesh["island"]) if tensor.get_local_rank() == 0 else None
            found[name, kind] = train(name, island, shard, tensor, peers=peers, within=tensor)
    model = Net()
    tensor_parallel(model, tensor)
    with pytest.raises(ConfigError, match="sharded over 2 ranks"):
        thinwire.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), announce=False)
    return found


def test_islands_of_two_ranks_train_as_islands_of_one() -> None:
    results = run_workers(grid, 4)
    for found in results:
        for (name, kind), weights in found.items():
            for key, value in weights.items():
                torch.testing.assert_close(
                    value, found[name, "whole"][key], rtol=0, atol=1e-6, msg=f"{name} {kind} {key}"
                )
                assert torch.equal(value, results[0][name, kind][key]), f"islands end apart: {name} {kind} {key}"
            start = dict(Net().named_parameters())
            assert any(not torch.allclose(value, start[key], atol=1e-3) for key, value in weights.items())
