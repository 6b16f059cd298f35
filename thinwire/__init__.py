"""Train large language models on machines joined by slow links."""

from thinwire.codecs import (
    Cast,
    Codec,
    CountSketch,
    GaussianSketch,
    Hadamard,
    Identity,
    Integer,
    Natural,
    RandomK,
    Sign,
    Threshold,
    TopK,
    Zstd,
)
from thinwire.collectives import Communicator, Topology
from thinwire.data_parallel import (
    DDP,
    FSDP,
    STRATEGIES,
    PowerSGD,
    SDP4Bit,
    Strategy,
    TrainingStrategy,
    Zero,
    ZeroBF16,
    ZeroOptimizer,
    strategy_named,
    zero,
)
from thinwire.errors import ConfigError, MismatchError, PeerLostError, ThinwireError

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "FSDP",
    "STRATEGIES",
    "Cast",
    "Codec",
    "Communicator",
    "ConfigError",
    "CountSketch",
    "GaussianSketch",
    "Hadamard",
    "Identity",
    "Integer",
    "MismatchError",
    "Natural",
    "PeerLostError",
    "PowerSGD",
    "RandomK",
    "SDP4Bit",
    "Sign",
    "Strategy",
    "ThinwireError",
    "Threshold",
    "TopK",
    "Topology",
    "TrainingStrategy",
    "Zero",
    "ZeroBF16",
    "ZeroOptimizer",
    "Zstd",
    "strategy_named",
    "zero",
]
