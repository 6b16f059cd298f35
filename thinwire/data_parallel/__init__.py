"""Second floor: strategies, each a choice of codecs, state and collectives.

Those of our own sharded optimizer lie in `zero`, those of torch's wrappers in `ddp` and `fsdp`, three-level sharding in
`frontier`, fine-tuning by losses alone in `one_byte`, methods between islands in `islands`. `interface` says what a
strategy must offer, `strategies` lists those that `--strategy` knows.
"""

from thinwire.data_parallel.ddp import (
    DDP,
    DGC,
    CompressedDDP,
    EFInteger,
    EFTopK,
    LGreCo,
    OneBitAdam,
    PowerSGD,
    Sketch,
    TorchPowerSGD,
    TwoWay,
    compress_ddp,
)
from thinwire.data_parallel.frontier import Frontier
from thinwire.data_parallel.frontier.footprint import frontier_footprint as frontier_footprint
from thinwire.data_parallel.fsdp import FSDP, ZeroPP
from thinwire.data_parallel.fsdp.compress import CompressedFSDP, compress_fsdp
from thinwire.data_parallel.fsdp.footprint import fsdp_footprint as fsdp_footprint
from thinwire.data_parallel.interface import (
    Footprint,
    NotExplainedError,
    ParallelOptimizer,
    TrainingStrategy,
    footprint,
)
from thinwire.data_parallel.islands import DiLoCo, Islands, LocalSGD, StreamingDiLoCo
from thinwire.data_parallel.one_byte import OneByte, OneByteLog, OneByteOptimizer, one_byte
from thinwire.data_parallel.strategies import (
    STRATEGIES,
    SDP4Bit,
    Zero,
    ZeroBF16,
    ZeroCompressed,
    strategy_named,
)
from thinwire.data_parallel.watchdog import DeadGradientError
from thinwire.data_parallel.wire import Strategy
from thinwire.data_parallel.zero import ReplicaError, ZeroOptimizer, zero

__all__ = [
    "LGreCo",
    "EFTopK",
    "EFInteger",
    "DDP",
    "DeadGradientError",
    "CompressedFSDP",
    "DGC",
    "DiLoCo",
    "Islands",
    "LocalSGD",
    "StreamingDiLoCo",
    "FSDP",
    "Footprint",
    "Frontier",
    "NotExplainedError",
    "STRATEGIES",
    "CompressedDDP",
    "OneBitAdam",
    "OneByte",
    "OneByteLog",
    "OneByteOptimizer",
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
    "ZeroPP",
    "compress_ddp",
    "compress_fsdp",
    "footprint",
    "one_byte",
    "strategy_named",
    "zero",
]
