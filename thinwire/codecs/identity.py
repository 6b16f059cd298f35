"""The exact codec: fp32 as it is. Tests compare every collective and strategy with the exact reference through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.spelling import spelled


@spelled("fp32")
@dataclass(frozen=True)
class Identity(Codec):
    """C(x) = x; 32 bits per element."""

    @property
    def traits(self) -> Traits:
        return Traits(lossless=True, unbiased=True, contraction=True, linear=True, keeps_zeros=1)

    @property
    def bits_per_element(self) -> float:
        return 32.0

    def packet_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def places(self, num_elements: int) -> Sequence[tuple[int, int]]:
        return [(0, 4)]

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        _values(out).copy_(x.reshape(-1))
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        values = _values(packet)
        return values.clone() if out is None else out.copy_(values)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        return out.add_(_values(packet))

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        _values(out).add_(_values(packet))
        return out


def _values(packet: Tensor) -> Tensor:
    """The packet as fp32; an empty one may lie anywhere in a message, and torch gives a view of whole words only."""
    return packet.view(torch.float32) if packet.numel() else packet.new_empty(0, dtype=torch.float32)
