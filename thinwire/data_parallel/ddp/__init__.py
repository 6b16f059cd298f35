"""Hooks for torch's DistributedDataParallel: how the gradients of its buckets are averaged."""

from thinwire.data_parallel.ddp.attach import CompressedDDP, compress_ddp
from thinwire.data_parallel.ddp.dgc import DGC
from thinwire.data_parallel.ddp.feedback import EFInteger, EFTopK
from thinwire.data_parallel.ddp.lgreco import LGreCo
from thinwire.data_parallel.ddp.onebit_adam import OneBitAdam
from thinwire.data_parallel.ddp.powersgd import PowerSGD
from thinwire.data_parallel.ddp.sketch import Sketch
from thinwire.data_parallel.ddp.strategies import DDP
from thinwire.data_parallel.ddp.torch_powersgd import TorchPowerSGD
from thinwire.data_parallel.ddp.two_way import TwoWay

__all__ = [
    "DDP",
    "DGC",
    "CompressedDDP",
    "EFInteger",
    "EFTopK",
    "LGreCo",
    "OneBitAdam",
    "PowerSGD",
    "Sketch",
    "TorchPowerSGD",
    "TwoWay",
    "compress_ddp",
]
