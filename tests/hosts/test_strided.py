"""Parameters whose elements do not lie in memory in the order of their indices: the same results as those that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.workers import run_workers

# What a method reads of a matrix besides its elements: its blocks, its factors, its rows, its order; or nothing.
METHODS = {
    "demo": thinwire.DeMo(density=0.1, chunk=4),
    "powersgd": thinwire.PowerSGD(rank=1, start_step=0, min_compression=1.0),
    "sketch": thinwire.Sketch(),
    "ddp": thinwire.DDP(),
}


class Strided(nn.Module):
    """A transposed matrix and a convolution in channels_last, or the same ones in order."""

    def __init__(self, is_strided: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(24, 12).t())
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        if not is_strided:
            for param in self.parameters():
                param.data = param.data.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        # A power of two on both sides, so that no sum of products depends on their order.
        return (x @ self.matrix).sum() / 64 + self.conv(x.view(4, 3, 2, 2).repeat(1, 1, 2, 2)).sum() / 64


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(-4, 5, (4, 12), generator=torch.Generator().manual_seed(10 * step + rank)).float()


def averaged(rank: int, world_size: int, name: str) -> list[list[Tensor]]:
    """Gradients of two steps under compress_ddp, of strided parameters and of those in order."""
    told = []
    for is_strided in (True, False):
        model = Strided(is_strided)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = thinwire.compress_ddp(ddp, METHODS[name], optimizer, announce=False)
        grads = []
        for step in range(2):
            ddp(batch(rank, step)).backward()
            grads += [param.grad.clone().contiguous() for param in model.parameters() if param.grad is not None]
            ddp.zero_grad()
        told.append(grads)
        handle.close()
    return told


@pytest.mark.parametrize("name", METHODS)
def test_gradients_do_not_depend_on_the_layout_in_memory(name: str) -> None:
    for strided, ordered in run_workers(averaged, 2, name):
        assert len(strided) == 6
        for mine, expected in zip(strided, ordered, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def kept(rank: int, world_size: int) -> dict[str, Any]:
    """A step of hosts on a mesh, their state, and whether it loads."""
    told = {}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    for method in (thinwire.DDP(), thinwire.FSDP(), thinwire.ZeroPP(), thinwire.Zero()):
        model = Strided(is_strided=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        stage = thinwire.parallelize(model, optimizer, mesh, [method], announce=False)
        stage.forward_backward([batch(rank, 0)], lambda model, x: model(x))
        stage.step()
        told[method.name] = {name: tuple(piece.values.shape) for name, piece in stage.snapshot().pieces.items()}
        stage.close()
    return told


def test_hosts_of_a_mesh_take_and_save_them() -> None:
    for told in run_workers(kept, 2):
        assert told["ddp"]["weights/matrix"] == (288,)
        assert told["fsdp"]["weights/matrix"] == told["zeropp"]["weights/matrix"] == (144,)
