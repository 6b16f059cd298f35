"""Residual quantisation: a codec applied to the tensor, and again to what the first packet loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.random import derive_seed
from thinwire.codecs.sign import Sign
from thinwire.codecs.spelling import spelled
from thinwire.errors import ConfigError, check_types

SIGNS = Sign()


@spelled("twice", wraps="repeated")
@dataclass(frozen=True)
class Twice(Codec):
    """C(x) = Q(x) + Q(x - Q(x)) for the codec Q that is repeated, at twice the bits.

    Around signs it has the four levels +-s +-t: s is the mean of |x| over the group, and t that of | |x| - s |. They
    suit the largest elements of a tensor, none of which is near 0, where `Integer` and `Natural` spend one of their
    three levels of 2 bits.

    repeated: a codec that loses something. Raises ConfigError for a lossless one, and one of variable length.
    Packet: [Q's packet of x] [Q's packet of the rest].
    Source: Chen, Guan and Wang, "Approximate nearest neighbor search by residual vector quantization" (2010).
    """

    repeated: Codec = SIGNS

    def __post_init__(self) -> None:
        check_types(self)
        if self.repeated.traits.lossless or self.repeated.has_variable_length:
            why = "loses nothing" if self.repeated.traits.lossless else "has packets of variable length"
            raise ConfigError(f"twice around {self.repeated}, which {why}: take another codec, such as {SIGNS}")

    @property
    def traits(self) -> Traits:
        """A promise that holds for each of the two packets, whose seeds are independent, holds for both together."""
        return replace(self.repeated.traits, linear=False)

    @property
    def block(self) -> int:
        return self.repeated.block

    @property
    def bits_per_element(self) -> float:
        return 2 * self.repeated.bits_per_element

    def packet_bytes(self, num_elements: int) -> int:
        return 2 * self.repeated.packet_bytes(num_elements)

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        return self._encode(x, partial(self.repeated.encode, counter=counter), seed, out)

    def encode_rows(self, rows: Tensor, numbers: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        return self._encode(rows, partial(self.repeated.encode_rows, numbers=numbers), seed, out)

    def _encode(self, x: Tensor, encode: Callable[..., Tensor], seed: int, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(self.packet_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        first, second = out.chunk(2)
        encode(x, seed=seed, out=first)
        rest = x.detach().float() - self.repeated.decode(first, x.numel()).view(x.shape)
        encode(rest, seed=derive_seed(seed, 1), out=second)
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        first, second = packet.chunk(2)
        found = self.repeated.decode(first, num_elements, out=out)
        return self.repeated.decode_add(second, found)

    def backend(self, device: torch.device) -> str:
        return self.repeated.backend(device)
