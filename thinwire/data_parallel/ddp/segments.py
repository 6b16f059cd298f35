"""Slices of several tensors in one message, each coded as if it travelled alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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
    ranks draw alike; else the seed that is given enters too. threads: that work on the segments of one packet.
    """

    codec: Codec
    lengths: tuple[int, ...]
    seeds: tuple[int, ...]
    is_shared: bool = False
    threads: int = 1

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

        def encode_one(number: int, elements: slice, place: slice) -> None:
            own = self._seed(seed, number)
            self.codec.encode(x[elements], seed=own, counter=slice_ * self.lengths[number], out=packet[place])

        self._each(encode_one)
        return packet

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        values = torch.empty(num_elements) if out is None else out
        self._each(lambda n, elements, place: self.codec.decode(packet[place], self.lengths[n], out=values[elements]))
        return values

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        self._each(lambda _, elements, place: self.codec.decode_add(packet[place], out[elements]))
        return out

    def _seed(self, given: int, number: int) -> int:
        if self.is_shared:
            return self.seeds[number]
        # A seed and its complement draw opposite noise, and shall go on doing so.
        is_opposite = given >> 63
        mixed = derive_seed(given ^ MASK64 if is_opposite else given, self.seeds[number]) >> 1
        return mixed ^ MASK64 if is_opposite else mixed

    def _each(self, work: Callable[[int, slice, slice], Any]) -> None:
        """Call work(number, its elements, its bytes of the packet) for every segment; returns when all are done."""
        ends = list(accumulate(self.lengths))
        sizes = [self.codec.packet_bytes(length) for length in self.lengths]
        last_bytes = list(accumulate(sizes))
        elements = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        places = [slice(end - size, end) for end, size in zip(last_bytes, sizes, strict=True)]
        run = map if self.threads == 1 else _pool(self.threads).map
        for _ in run(work, range(len(ends)), elements, places):
            pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads of this process that pack and unpack; the kernels leave Python's lock alone."""
    return ThreadPoolExecutor(threads, thread_name_prefix="thinwire-codec")
