"""Accelerate with FSDP2; one line after `prepare` compresses what it exchanges.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import thinwire


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def sharding_accelerator() -> Accelerator:
    """Accelerate shards on GPUs alone. Without one, this makes it shard on the CPU too, which FSDP2 supports."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if accelerator.device.type == "cpu":
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def main() -> None:
    accelerator = sharding_accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(3)), nn.Linear(128, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    compressed = thinwire.attach(model, optimizer, thinwire.ZeroPP())

    teacher = torch.randn(128, 16, generator=torch.Generator().manual_seed(1)).to(accelerator.device) / 11
    data = torch.Generator().manual_seed(2 + accelerator.process_index)
    for step in range(30):
        x = torch.randn(32, 128, generator=data).to(accelerator.device)
        loss = (model(x) - x @ teacher).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 29 == 0:
            sent_mb = compressed.meter.snapshot().sent_bytes / 1e6
            accelerator.print(f"step {step}: loss {float(loss.detach()):.4f}, {sent_mb:.3f} MB sent")
    compressed.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
