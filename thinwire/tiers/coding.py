"""The form in which numbers are stored on a disk: plain, or encoded by a codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Identity, Integer
from thinwire.codecs.random import uniform

# Numbers below a step count as one, and this much more, so that no rounding makes a zero of them.
ABOVE_STEP = 1 + 2**-7


@dataclass(frozen=True)
class Coding:
    """How fp32 numbers are stored on a disk: as packets of a codec, or plain.

    Of numbers in bf16, the lower half of the bits is the probability with which a number is rounded away from zero, so
    that small updates add up.

    of_roots: packets of square roots, for numbers that are never negative, such as second moments. With integers, a
    root below one step of its group, other than zero, is raised to that step: the numbers divide others, and a zero
    would blow these up. Tensors are then whole groups.
    """

    codec: Codec = field(default_factory=Identity)
    of_roots: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the numbers are stored as they are."""
        return isinstance(self.codec, Identity)

    def num_bytes(self, numel: int) -> int:
        """Bytes of a packet of `numel` numbers."""
        return self.codec.packet_bytes(numel)

    def encode(self, values: Tensor, packet: Tensor, *, seed: int, counter: int) -> None:
        """Encode fp32 `values` [n] into `packet`, uint8 [num_bytes(n)]. Changes `values`. seed, counter: see Codec."""
        if self.of_roots:
            values.sqrt_()
            if isinstance(self.codec, Integer):
                groups = values.view(-1, self.codec.group)
                least = groups.amax(1, keepdim=True) * (ABOVE_STEP / self.codec.levels)
                groups.copy_(torch.where(groups > 0, groups.maximum(least), groups))
        if isinstance(self.codec, Cast):
            dither = uniform(seed, counter, values.numel()).mul_(1 << 16).to(torch.int32)
            bits = values.view(torch.int32)
            # Infinities, and what is no number, have no such bits to be rounded by.
            bits.copy_(torch.where(values.isfinite(), (bits + dither) & -(1 << 16), bits))
        self.codec.encode(values, seed=seed, counter=counter, out=packet)

    def decode(self, packet: Tensor, values: Tensor) -> None:
        """Decode a packet; the inverse of `encode`.

        Shape:
            packet: uint8 [num_bytes(n)]. values: fp32 [n], overwritten.
        """
        self.codec.decode(packet, values.numel(), out=values)
        if self.of_roots:
            values.square_()


PLAIN = Coding()
