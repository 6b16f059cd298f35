"""Optimizers, and the table of `--optimizer`."""

from thinwire.optim.apollo import Apollo, ApolloMini
from thinwire.optim.dgc_sgd import DGCSGD
from thinwire.optim.dion import DionOptimizer
from thinwire.optim.fisher import InverseFisher
from thinwire.optim.lans import LANS
from thinwire.optim.matrices import MatrixOptimizer
from thinwire.optim.mfac import MFAC
from thinwire.optim.muon import Muon
from thinwire.optim.onebit_adam import OneBitAdamW
from thinwire.optim.registry import (
    ELEMENTWISE,
    GENERAL,
    JOINT,
    MATRIXWISE,
    MESHED,
    NAMED,
    OPTIMIZERS,
    SHARDED,
    WHOLE,
    make_optimizer,
    options_of_optimizer,
)
from thinwire.optim.sums import Part, Shards, Sum, SummingOptimizer

__all__ = [
    "Apollo", "ApolloMini", "DGCSGD", "ELEMENTWISE", "GENERAL", "JOINT", "LANS", "MATRIXWISE", "MESHED", "MFAC",
    "NAMED", "OPTIMIZERS", "SHARDED", "WHOLE", "DionOptimizer", "InverseFisher", "MatrixOptimizer", "Muon",
    "OneBitAdamW", "Part", "Shards", "Sum", "SummingOptimizer", "make_optimizer", "options_of_optimizer",
]  # fmt: skip
