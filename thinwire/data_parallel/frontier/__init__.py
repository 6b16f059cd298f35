"""Three-level sharding: weights, gradients and the optimizer's state each over a group of its own size."""

from thinwire.data_parallel.frontier.strategies import Frontier

__all__ = ["Frontier"]
