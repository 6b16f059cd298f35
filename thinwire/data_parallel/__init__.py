"""Second floor: strategies, each a choice of codecs, state and collectives."""

from thinwire.data_parallel.strategies import STRATEGIES, SDP4Bit, Strategy, Zero, ZeroBF16, strategy_named
from thinwire.data_parallel.zero import ReplicaError, ZeroOptimizer, zero

__all__ = [
    "STRATEGIES",
    "ReplicaError",
    "SDP4Bit",
    "Strategy",
    "Zero",
    "ZeroBF16",
    "ZeroOptimizer",
    "strategy_named",
    "zero",
]
