"""Second floor: optimizers, and those that `--optimizer` knows."""

from thinwire.optim.dgc_sgd import DGCSGD
from thinwire.optim.lans import LANS
from thinwire.optim.onebit_adam import OneBitAdamW
from thinwire.optim.registry import ELEMENTWISE, GENERAL, OPTIMIZERS, make_optimizer

__all__ = ["DGCSGD", "ELEMENTWISE", "GENERAL", "LANS", "OPTIMIZERS", "OneBitAdamW", "make_optimizer"]
