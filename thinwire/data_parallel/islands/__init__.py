"""Islands that exchange rarely: DiLoCo, Streaming DiLoCo and local SGD around any strategy inside an island."""

from thinwire.data_parallel.islands.library import DiLoCo, Islands, LocalSGD, StreamingDiLoCo
from thinwire.data_parallel.islands.strategies import ISLANDS, AmongIslands, OnIslands

__all__ = ["ISLANDS", "AmongIslands", "DiLoCo", "Islands", "LocalSGD", "OnIslands", "StreamingDiLoCo"]
