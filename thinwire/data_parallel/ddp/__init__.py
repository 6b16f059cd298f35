"""Hooks for torch's DistributedDataParallel: how the gradients of its buckets are averaged."""

from thinwire.data_parallel.ddp.attach import CompressedDDP, compress_ddp
from thinwire.data_parallel.ddp.feedback import EFInteger, EFTopK
from thinwire.data_parallel.ddp.lgreco import LGreCo
from thinwire.data_parallel.ddp.sketch import Sketch
from thinwire.data_parallel.ddp.strategies import DDP, PowerSGD

__all__ = ["DDP", "CompressedDDP", "EFInteger", "EFTopK", "LGreCo", "PowerSGD", "Sketch", "compress_ddp"]
