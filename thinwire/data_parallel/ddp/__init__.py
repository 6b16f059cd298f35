"""Hooks for torch's DistributedDataParallel: how the gradients of its buckets are averaged."""

from thinwire.data_parallel.ddp.attach import CompressedDDP, compress_ddp
from thinwire.data_parallel.ddp.dgc import DGC
from thinwire.data_parallel.ddp.onebit_adam import OneBitAdam
from thinwire.data_parallel.ddp.strategies import DDP, PowerSGD

__all__ = ["DDP", "DGC", "CompressedDDP", "OneBitAdam", "PowerSGD", "compress_ddp"]
