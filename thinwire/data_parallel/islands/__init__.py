"""Islands that exchange rarely, or have no common step at all; any strategy inside an island."""

from thinwire.data_parallel.islands.dadao import DADAO
from thinwire.data_parallel.islands.fedfix import FedFix
from thinwire.data_parallel.islands.gossip import Gossip
from thinwire.data_parallel.islands.library import DiLoCo, Islands, LocalSGD, StreamingDiLoCo
from thinwire.data_parallel.islands.strategies import ISLANDS, AmongIslands, OnIslands

__all__ = [
    "DADAO", "ISLANDS", "AmongIslands", "DiLoCo", "FedFix", "Gossip", "Islands", "LocalSGD", "OnIslands",
    "StreamingDiLoCo",
]  # fmt: skip
