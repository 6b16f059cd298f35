"""Fine-tuning whose gradients are one byte: two losses along a direction that every rank can draw for itself."""

from thinwire.data_parallel.one_byte.log import OneByteLog
from thinwire.data_parallel.one_byte.optimizer import OneByteOptimizer, one_byte
from thinwire.data_parallel.one_byte.strategy import OneByte

__all__ = ["OneByte", "OneByteLog", "OneByteOptimizer", "one_byte"]
