"""Several codecs one after the other in one packet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.base import Traits


@dataclass(frozen=True)
class Sections(Codec):
    """Several codecs one after the other: the first n_0 elements by the first, the next n_1 by the second, ...

    parts: (codec, elements) each. It packs sum(n_i) elements and no other number of them; packets stand one behind the
    other. So no group of a quantiser spans two parameters. starts: the numbers of the first elements of the parts, for
    the codecs' randomness, and at the end their number; where other ranks hold more of some part, so that the others
    draw the same there.
    """

    parts: tuple[tuple[Codec, int], ...]
    starts: tuple[int, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[tuple[Codec, int]], most: Sequence[int] = ()) -> Sections:
        """With neighbours of one codec that has no groups put together; most: elements of each part elsewhere."""
        if list(most) != [length for _, length in parts][: len(most)]:
            return cls(tuple(parts), tuple(accumulate(most, initial=0)))
        merged: list[tuple[Codec, int]] = []
        for codec, length in parts:
            if merged and codec.block == 1 and merged[-1][0] == codec:
                length += merged.pop()[1]
            merged.append((codec, length))
        return cls(tuple(merged))

    @property
    def numel(self) -> int:
        """The number of elements that it packs."""
        return sum(length for _, length in self.parts)

    @property
    def traits(self) -> Traits:
        traits = [codec.traits for codec, _ in self.parts]
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
        return sum(codec.packet_bytes(length) for codec, length in self.parts) if num_elements else 0

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        if self.starts:
            counter = counter // self.numel * self.starts[-1]
        for codec, values, packet, start in self._cut(x, out):
            codec.encode(values, seed=seed, counter=counter + start, out=packet)
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(num_elements, device=packet.device)
        for codec, values, piece, _ in self._cut(out, packet):
            codec.decode(piece, values.numel(), out=values)
        return out

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        for codec, values, piece, _ in self._cut(out, packet):
            codec.decode_add(piece, values)
        return out

    def backend(self, device: torch.device) -> str:
        return ", ".join(sorted({codec.backend(device) for codec, _ in self.parts}))

    def _cut(self, x: Tensor, packet: Tensor) -> list[tuple[Codec, Tensor, Tensor, int]]:
        """(codec, its elements, its bytes, number of the first element) of each section."""
        lengths = [length for _, length in self.parts]
        values = x.reshape(-1).split(lengths)
        packets = packet.split([codec.packet_bytes(length) for codec, length in self.parts])
        starts = self.starts or accumulate(lengths, initial=0)
        return [(codec, *rest) for (codec, _), *rest in zip(self.parts, values, packets, starts, strict=False)]
