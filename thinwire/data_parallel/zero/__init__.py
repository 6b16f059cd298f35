"""Our own ZeRO-1/2 wrapper: sharded masters and optimizer state, compressed gradients and weights."""

from thinwire.data_parallel.replicas import ReplicaError
from thinwire.data_parallel.zero.footprint import zero_footprint as zero_footprint
from thinwire.data_parallel.zero.optimizer import ZeroOptimizer
from thinwire.data_parallel.zero.wrap import zero

__all__ = ["ReplicaError", "ZeroOptimizer", "zero"]
