"""torchtitan: wrap the model's parallelize function, and FSDP2 exchanges compressed packets.

In torchtitan itself it is one line, in the spec of the model that you train:

    spec = dataclasses.replace(spec, parallelize_fn=CompressedParallelize(spec.parallelize_fn, thinwire.ZeroPP()))

Its trainer needs a GPU. This does with the function what that trainer does: it makes the model without memory, has it
parallelized, gives it memory and weights, and trains.

torchrun --nproc-per-node 2 examples/titan_spec.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import thinwire
from thinwire.adapters.titan import CompressedParallelize


def parallelize(model: nn.Module, *, parallel_dims: dict[str, Any], **_: Any) -> nn.Module:
    """Stands for a function of torchtitan, such as parallelize_llama, which takes more of the same kind."""
    mesh = parallel_dims["fsdp"]
    for block in list(model.children())[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def initialise(model: nn.Module) -> None:
    """Weights from one seed, whatever the sharding."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        whole = torch.randn(param.shape, generator=generator) / param.shape[-1] ** 0.5
        local = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        param.data.copy_(local)


def main() -> None:
    dist.init_process_group("gloo")
    parallelize_fn = CompressedParallelize(parallelize, thinwire.ZeroPP())
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)), nn.Linear(128, 16)
        )
    model = parallelize_fn(model, parallel_dims={"fsdp": init_device_mesh("cpu", (dist.get_world_size(),))})
    model.to_empty(device="cpu")
    with torch.no_grad():
        initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    teacher = torch.randn(128, 16, generator=torch.Generator().manual_seed(1)) / 11
    data = torch.Generator().manual_seed(2 + dist.get_rank())
    for step in range(30):
        x = torch.randn(32, 128, generator=data)
        loss = (model(x) - x @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 29 == 0:
            (compressed,) = parallelize_fn.handles
            print(f"step {step}: loss {float(loss):.4f}, {compressed.meter.snapshot().sent_bytes / 1e6:.3f} MB sent")
    parallelize_fn.handles[0].close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
