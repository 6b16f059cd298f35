"""Your own loop over FSDP2; one line compresses what it exchanges.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(128, 16))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    compressed = thinwire.compress_fsdp(model, thinwire.ZeroPP(weights="int8/2048:nearest", inter_gradients="int4"))

    task = torch.Generator().manual_seed(1)
    teacher = torch.randn(128, 16, generator=task)
    data = torch.Generator().manual_seed(2 + dist.get_rank())
    for step in range(30):
        x = torch.randn(32, 128, generator=data)
        loss = (model(x) - x @ teacher / 11).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 29 == 0:
            print(f"step {step}: loss {float(loss):.4f}, {compressed.meter.snapshot().sent_bytes / 1e6:.3f} MB sent")
    compressed.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
