"""Train large language models on machines joined by slow links."""

from thinwire.codecs import Cast, Codec, Hadamard, Identity, Integer
from thinwire.collectives import Communicator, Topology
from thinwire.data_parallel import (
    STRATEGIES,
    SDP4Bit,
    Strategy,
    Zero,
    ZeroBF16,
    ZeroOptimizer,
    strategy_named,
    zero,
)
from thinwire.errors import ConfigError, MismatchError, PeerLostError, ThinwireError

__version__ = "0.1.0"

__all__ = [
    "STRATEGIES",
    "Cast",
    "Codec",
    "Communicator",
    "ConfigError",
    "Hadamard",
    "Identity",
    "Integer",
    "MismatchError",
    "PeerLostError",
    "SDP4Bit",
    "Strategy",
    "ThinwireError",
    "Topology",
    "Zero",
    "ZeroBF16",
    "ZeroOptimizer",
    "strategy_named",
    "zero",
]
