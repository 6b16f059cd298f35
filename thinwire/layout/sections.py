"""Several tensors in one packet. Each has its own codec and is encoded as if it travelled alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.codecs import Codec, derive_seed
from thinwire.codecs.base import Traits
from thinwire.codecs.random import MASK64


@dataclass(frozen=True)
class Section:
    """The next `length` elements of a message, packed by `codec`.

    first, stride: numbers for the codec's randomness: in slice j of the message, elements count from first + j stride.
    seed: combined with the message's seed; None: the message's seed only.
    """

    codec: Codec
    length: int
    first: int
    stride: int
    seed: int | None = None


@dataclass(frozen=True)
class Sections(Codec):
    """Sections one after the other. Neither a quantisation group nor a packet spans two of them.

    Packs exactly the elements of all sections; `counter` is the number of the slice. is_shared: draw from the sections'
    own seeds only, so that all ranks draw the same numbers.
    """

    parts: tuple[Section, ...]
    is_shared: bool = False

    @classmethod
    def of(cls, parts: Sequence[tuple[Codec, int]], most: Sequence[int] = ()) -> Sections:
        """Sections of (codec, elements), numbered through. Neighbours with one codec that has no groups are merged.

        most: the largest size of each part on any rank, if sizes differ, so that all ranks number elements alike.
        """
        merged: list[tuple[Codec, int]] = []
        is_same = list(most) == [length for _, length in parts][: len(most)]
        for codec, length in parts:
            if is_same and merged and codec.block == 1 and merged[-1][0] == codec:
                length += merged.pop()[1]
            merged.append((codec, length))
        *firsts, stride = accumulate((length for _, length in merged) if is_same else most, initial=0)
        return cls(tuple(Section(*part, first, stride) for part, first in zip(merged, firsts, strict=True)))

    @classmethod
    def alone(cls, codec: Codec, lengths: Sequence[int], seeds: Sequence[int], *, is_shared: bool = False) -> Sections:
        """The same codec on slices of several tensors; each tensor has its own numbering and seed.

        The result for a value then depends only on its tensor and its position there, not on the rest of the message.
        lengths: in whole blocks of the codec.
        """
        parts = zip(lengths, seeds, strict=True)
        return cls(tuple(Section(codec, length, 0, length, seed) for length, seed in parts), is_shared)

    @property
    def numel(self) -> int:
        """Number of elements of all sections."""
        return sum(part.length for part in self.parts)

    @property
    def traits(self) -> Traits:
        traits = [part.codec.traits for part in self.parts]
        return Traits(
            **{name: all(getattr(t, name) for t in traits) for name in ("lossless", "unbiased", "contraction")}
        )

    @property
    def block(self) -> int:
        return self.numel

    @property
    def bits_per_element(self) -> float:
        return 8 * self.packet_bytes(self.numel) / self.numel

    def packet_bytes(self, num_elements: int) -> int:
        assert num_elements in (0, self.numel), f"{num_elements} elements, not the {self.numel} of the sections"
        return sum(part.codec.packet_bytes(part.length) for part in self.parts) if num_elements else 0

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        slice_, inside = divmod(counter, self.numel) if self.numel else (0, 0)
        for part, values, packet in self._cut(x, out):
            number = slice_ * part.stride + part.first + inside
            part.codec.encode(values, seed=self._seed(seed, part.seed), counter=number, out=packet)
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(num_elements, device=packet.device)
        for part, values, piece in self._cut(out, packet):
            part.codec.decode(piece, values.numel(), out=values)
        return out

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        for part, values, piece in self._cut(out, packet):
            part.codec.decode_add(piece, values)
        return out

    def backend(self, device: torch.device) -> str:
        return ", ".join(sorted({part.codec.backend(device) for part in self.parts}))

    def _seed(self, given: int, own: int | None) -> int:
        if own is None or self.is_shared:
            return given if own is None else own
        # A seed and its complement draw opposite noise, and shall go on doing so.
        is_opposite = given >> 63
        mixed = derive_seed(given ^ MASK64 if is_opposite else given, own) >> 1
        return mixed ^ MASK64 if is_opposite else mixed

    def _cut(self, x: Tensor, packet: Tensor) -> Iterator[tuple[Section, Tensor, Tensor]]:
        """Yield each section with its elements and its bytes."""
        values = x.reshape(-1).split([part.length for part in self.parts])
        packets = packet.split([part.codec.packet_bytes(part.length) for part in self.parts])
        yield from zip(self.parts, values, packets, strict=True)
