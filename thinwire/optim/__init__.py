"""Optimizers, and the table of `--optimizer`."""

from thinwire.optim.dgc_sgd import DGCSGD
from thinwire.optim.lans import LANS
from thinwire.optim.muon import Muon
from thinwire.optim.onebit_adam import OneBitAdamW
from thinwire.optim.registry import ELEMENTWISE, GENERAL, OPTIMIZERS, SHARDED, WHOLE, make_optimizer

__all__ = [
    "DGCSGD", "ELEMENTWISE", "GENERAL", "LANS", "OPTIMIZERS", "SHARDED", "WHOLE", "Muon", "OneBitAdamW",
    "make_optimizer",
]  # fmt: skip
