"""The exact codec: fp32 as it is. Every collective and strategy is held to the exact reference with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Traits


@dataclass(frozen=True)
class Identity(Codec):
    """C(x) = x; 32 bits per element."""

    def __str__(self) -> str:
        return "fp32"

    @property
    def traits(self) -> Traits:
        return Traits(lossless=True, unbiased=True, contraction=True, linear=True)

    @property
    def bits_per_element(self) -> float:
        return 32.0

    def packet_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        out.view(torch.float32).copy_(x.reshape(-1))
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        values = packet.view(torch.float32)
        return values.clone() if out is None else out.copy_(values)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        return out.add_(packet.view(torch.float32))

    def packet_add(self, packet: Tensor, out: Tensor) -> Tensor:
        out.view(torch.float32).add_(packet.view(torch.float32))
        return out
