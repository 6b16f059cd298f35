"""A codec around another one: its packets travel in a shorter form, with a header in front, and lose nothing more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Traits


class Shortened(Codec):
    """Base of codecs that shorten the finished packet of `coded`. What is decoded has the bits of `coded`.

    A packet has room for the whole packet behind the header; only `length` bytes travel, which depends on the values.
    """

    HEADER_BYTES: ClassVar[int]
    coded: Codec

    @abstractmethod
    def shorten(self, out: Tensor, num_elements: int) -> None:
        """Turn the packet of `coded` that stands behind the header into what travels, and write the header."""

    @abstractmethod
    def whole(self, packet: Tensor, num_elements: int) -> Tensor:
        """The packet of `coded`."""

    @abstractmethod
    def is_marked(self, packet: Tensor) -> bool:
        """Whether the packet of `coded` holds marks."""

    @property
    def traits(self) -> Traits:
        return replace(self.coded.traits, linear=False)

    @property
    def block(self) -> int:
        return self.coded.block

    @property
    def bits_per_element(self) -> float:
        """An upper bound; a short tensor costs the header in addition."""
        return self.coded.bits_per_element

    def packet_bytes(self, num_elements: int) -> int:
        return self.HEADER_BYTES + self.coded.packet_bytes(num_elements)

    @property
    def has_variable_length(self) -> bool:
        return True

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.encode_all([x], [out], seed=seed, counters=[counter])
        return out

    def encode_all(
        self, xs: Sequence[Tensor], outs: Sequence[Tensor], *, seed: int = 0, counters: Sequence[int]
    ) -> None:
        self.coded.encode_all(xs, [out[self.HEADER_BYTES :] for out in outs], seed=seed, counters=counters)
        for x, out in zip(xs, outs, strict=True):
            self.shorten(out, x.numel())

    def marks(self, packet: Tensor, num_elements: int) -> Tensor | None:
        return self.coded.marks(self.whole(packet, num_elements), num_elements) if self.is_marked(packet) else None

    def encode_marked(self, x: Tensor, marks: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor) -> Tensor:
        self.coded.encode_marked(x, marks, seed=seed, counter=counter, out=out[self.HEADER_BYTES :])
        self.shorten(out, x.numel())
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        return self.coded.decode(self.whole(packet, num_elements), num_elements, out=out)

    def decode_sum(self, packets: Sequence[Tensor], out: Tensor, *, add: bool = False) -> Tensor:
        return self.coded.decode_sum([self.whole(packet, out.numel()) for packet in packets], out, add=add)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        return self.coded.decode_add(self.whole(packet, out.numel()), out)

    def decode_all(self, packets: Sequence[Tensor], outs: Sequence[Tensor], *, add: bool = False) -> None:
        wholes = [self.whole(packet, out.numel()) for packet, out in zip(packets, outs, strict=True)]
        self.coded.decode_all(wholes, outs, add=add)
