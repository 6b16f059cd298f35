"""Second floor: strategies, each a choice of codecs, state and collectives.

Those of our own sharded optimizer lie in `zero`, those of torch's wrappers in `ddp` and `fsdp`. `interface` says what a
strategy must offer, `strategies` lists those that `--strategy` knows.
"""

from thinwire.data_parallel.ddp import DDP, PowerSGD
from thinwire.data_parallel.fsdp import FSDP, ZeroPP
from thinwire.data_parallel.fsdp.compress import CompressedFSDP, compress_fsdp
from thinwire.data_parallel.interface import ParallelOptimizer, TrainingStrategy
from thinwire.data_parallel.strategies import STRATEGIES, SDP4Bit, Zero, ZeroBF16, strategy_named
from thinwire.data_parallel.watchdog import DeadGradientError
from thinwire.data_parallel.wire import Strategy
from thinwire.data_parallel.zero import ReplicaError, ZeroOptimizer, zero

__all__ = [
    "DDP",
    "DeadGradientError",
    "CompressedFSDP",
    "FSDP",
    "STRATEGIES",
    "ParallelOptimizer",
    "PowerSGD",
    "ReplicaError",
    "SDP4Bit",
    "Strategy",
    "TrainingStrategy",
    "Zero",
    "ZeroBF16",
    "ZeroOptimizer",
    "ZeroPP",
    "compress_fsdp",
    "strategy_named",
    "zero",
]
