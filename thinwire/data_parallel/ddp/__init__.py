"""Hooks for torch's DistributedDataParallel: how the gradients of its buckets are averaged."""

from thinwire.data_parallel.ddp.attach import CompressedDDP, compress_ddp
from thinwire.data_parallel.ddp.strategies import DDP, PowerSGD

__all__ = ["DDP", "CompressedDDP", "PowerSGD", "compress_ddp"]
