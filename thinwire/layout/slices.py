"""Tensors in one message, each cut into a slice for every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.collectives import Topology
from thinwire.collectives.reduce import all_reduce_bytes, slice_length


@dataclass(frozen=True)
class Slices:
    """How tensors lie in one message: each cut into a slice for every rank, fp32 [world_size, sum of lengths].

    Who owns an element then depends on its tensor alone, not on the bucket. numels, lengths: elements of each tensor,
    and of each of its slices, the last ones filled up with zeros.
    """

    world_size: int
    numels: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, numels: Iterable[int], world_size: int, *codecs: Codec) -> Slices:
        numels = tuple(numels)
        return cls(world_size, numels, tuple(slice_length(numel, world_size, *codecs) for numel in numels))

    @property
    def length(self) -> int:
        """Elements of a rank's slice of the message."""
        return sum(self.lengths)

    def pack(self, tensors: Iterable[Tensor], out: Tensor) -> Tensor:
        """Copy the tensors, flat or not, into the message `out`."""
        for tensor, place in zip(tensors, out.split(self.lengths, dim=1), strict=True):
            padded = torch.nn.functional.pad(tensor.reshape(-1), (0, place.numel() - tensor.numel()))
            place.copy_(padded.view(place.shape))
        return out

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Flat copies of the tensors: where in memory factors lie may change how a matrix product is rounded."""
        parts = message.view(self.world_size, -1).split(self.lengths, dim=1)
        return [part.reshape(-1)[:numel].clone() for part, numel in zip(parts, self.numels, strict=True)]

    def all_reduce_bytes(self, grid: Topology, codec: Codec) -> dict[str, int]:
        """Payload of a rank for the message's sum, all of it in `codec`."""
        return all_reduce_bytes(self.world_size * self.length, grid, codec, codec, codec)
