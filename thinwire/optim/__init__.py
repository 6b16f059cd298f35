"""Second floor: optimizers, and those that `--optimizer` knows."""

from thinwire.optim.lans import LANS
from thinwire.optim.registry import ELEMENTWISE, GENERAL, OPTIMIZERS, make_optimizer

__all__ = ["ELEMENTWISE", "GENERAL", "LANS", "OPTIMIZERS", "make_optimizer"]
