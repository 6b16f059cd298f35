"""Islands that talk rarely, or that have no common step at all."""

from thinwire.data_parallel.islands.dadao import DADAO
from thinwire.data_parallel.islands.fedfix import FedFix
from thinwire.data_parallel.islands.gossip import Gossip

__all__ = ["DADAO", "FedFix", "Gossip"]
