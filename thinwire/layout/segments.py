"""Slices of several tensors in one message, each coded as if it travelled alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.codecs.base import Traits
from thinwire.codecs.random import MASK64


@dataclass(frozen=True)
class Segments(Codec):
    """`codec` on consecutive segments of `lengths` elements, whole blocks of it, each with a seed of its own.

    A message is slice 0, 1, ... of every tensor, so `counter` must be a multiple of the sum of lengths: slice j of a
    tensor whose slices have n elements is numbered from j n. What a value becomes then depends on its tensor and its
    place there, not on what else is in the message. is_shared: draw from the segments' own seeds alone, so that all
    ranks draw alike; else the seed that is given enters too.
    """

    codec: Codec
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    is_shared: bool = False

    @property
    def traits(self) -> Traits:
        return self.codec.traits

    @property
    def block(self) -> int:
        return sum(self.lengths)

    @property
    def bits_per_element(self) -> float:
        return 8 * self.packet_bytes(self.block) / self.block

    def packet_bytes(self, num_elements: int) -> int:
        return sum(map(self.codec.packet_bytes, self.lengths)) if num_elements else 0

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        packet = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8) if out is None else out
        slice_ = counter // self.block
        for number, (elements, place) in enumerate(self._places()):
            own = self._seed(seed, number)
            self.codec.encode(x[elements], seed=own, counter=slice_ * self.lengths[number], out=packet[place])
        return packet

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        values = torch.empty(num_elements) if out is None else out
        for elements, place in self._places():
            self.codec.decode(packet[place], elements.stop - elements.start, out=values[elements])
        return values

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        for elements, place in self._places():
            self.codec.decode_add(packet[place], out[elements])
        return out

    def _seed(self, given: int, number: int) -> int:
        if self.is_shared:
            return self.seeds[number]
        # A seed and its complement draw opposite noise, and shall go on doing so.
        is_opposite = given >> 63
        mixed = derive_seed(given ^ MASK64 if is_opposite else given, self.seeds[number]) >> 1
        return mixed ^ MASK64 if is_opposite else mixed

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Every segment's elements, and its bytes of the packet."""
        sizes = [self.codec.packet_bytes(length) for length in self.lengths]
        ends = zip(self.lengths, accumulate(self.lengths), sizes, accumulate(sizes), strict=True)
        for length, end, size, last_byte in ends:
            yield slice(end - length, end), slice(last_byte - size, last_byte)
