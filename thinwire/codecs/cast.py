"""Cast to a 16-bit float: half the bytes, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Traits
from thinwire.codecs.spelling import spelled
from thinwire.errors import ConfigError, check_types, nearest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@spelled("bf16", sets={"dtype": "bf16"})
@spelled("fp16", sets={"dtype": "fp16"})
@dataclass(frozen=True)
class Cast(Codec):
    """C(x) = x rounded to nearest even in `dtype`; 16 bits per element.

    "bf16" keeps the range of fp32 and 8 significant bits (relative error at most 2^-8); "fp16" keeps 11 bits
    and overflows to inf beyond 65504, which stays visible. Odd lengths are padded with 2 zero bytes. Raises
    ConfigError for other dtypes.
    """

    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_types(self)
        if self.dtype not in DTYPES:
            raise ConfigError(f"cast dtype {self.dtype!r} is unknown{nearest(str(self.dtype), DTYPES)}")

    @property
    def traits(self) -> Traits:
        """fp16 is no contraction: beyond 65504 it returns inf."""
        return Traits(contraction=self.dtype == "bf16", keeps_zeros=1)

    @property
    def bits_per_element(self) -> float:
        return 16.0

    def packet_bytes(self, num_elements: int) -> int:
        return -(-num_elements // 2) * 4

    def places(self, num_elements: int) -> Sequence[tuple[int, int]]:
        return [(0, 2)]

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        num = x.numel()
        if out is None:
            out = torch.empty(self.packet_bytes(num), dtype=torch.uint8, device=x.device)
        out[: 2 * num].view(DTYPES[self.dtype]).copy_(x.detach().reshape(-1))
        out[2 * num :] = 0
        return out

    def decode(self, packet: Tensor, num_elements: int, *, out: Tensor | None = None) -> Tensor:
        values = self._values(packet, num_elements)
        return values.to(torch.float32) if out is None else out.copy_(values)

    def decode_add(self, packet: Tensor, out: Tensor) -> Tensor:
        return out.add_(self._values(packet, out.numel()))

    def _values(self, packet: Tensor, num_elements: int) -> Tensor:
        return packet[: 2 * num_elements].view(DTYPES[self.dtype])
