"""Second floor: strategies, each a choice of codecs, state and collectives.

Those of our own sharded optimizer lie in `zero`, those of torch's wrappers in `ddp` and `fsdp`. `interface` says what a
strategy must offer, `strategies` lists those that `--strategy` knows.
"""

from thinwire.data_parallel.ddp import (
    DDP,
    CompressedDDP,
    EFInteger,
    EFTopK,
    LGreCo,
    PowerSGD,
    Sketch,
    TorchPowerSGD,
    TwoWay,
    compress_ddp,
)
from thinwire.data_parallel.fsdp import FSDP
from thinwire.data_parallel.interface import ParallelOptimizer, TrainingStrategy
from thinwire.data_parallel.strategies import (
    STRATEGIES,
    SDP4Bit,
    Strategy,
    Zero,
    ZeroBF16,
    ZeroCompressed,
    strategy_named,
)
from thinwire.data_parallel.zero import ReplicaError, ZeroOptimizer, zero

__all__ = [
    "DDP",
    "FSDP",
    "STRATEGIES",
    "CompressedDDP",
    "EFInteger",
    "EFTopK",
    "LGreCo",
    "ParallelOptimizer",
    "PowerSGD",
    "ReplicaError",
    "SDP4Bit",
    "Sketch",
    "Strategy",
    "TorchPowerSGD",
    "TrainingStrategy",
    "TwoWay",
    "Zero",
    "ZeroBF16",
    "ZeroCompressed",
    "ZeroOptimizer",
    "compress_ddp",
    "strategy_named",
    "zero",
]
