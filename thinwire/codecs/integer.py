"""Block-wise symmetric integers of 2, 3, 4, 6 or 8 bits, one scale for each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks
from thinwire.codecs.base import Traits
from thinwire.codecs.grouped import SCALES, Grouped
from thinwire.codecs.layout import LANES
from thinwire.codecs.spelling import Number, Word, spelled
from thinwire.errors import check_types

# An fp32 scale is a number where its bits are below.
INF_BITS = 0x7F800000
WIDTHS = tuple(bits for bits in LANES if bits > 1)
ROUNDINGS: tuple[str, ...] = ("nearest", "stochastic")


@spelled(Number("bits", "int"), Word("scale", SCALES), Word("rounding", ROUNDINGS), group="group")
@dataclass(frozen=True)
class Integer(Grouped):
    """code = clamp(round(x * M/s), -M, M), s = max|x| of the group, M = 2^(bits-1) - 1; decoded: code * s/M.

    bits: 2, 3, 4, 6 or 8. group: elements that share a scale, any number >= 1. rounding: "nearest" (ties to
    even) or "stochastic" (up with the probability of the remainder, from a hash of seed and counter). scale:
    "fp32", or "bf16" rounded up. A group with max|x| < 2^-100 decodes to zeros; a group with a NaN or inf
    decodes to NaN, no other is touched. Raises ConfigError for other values. Source: SDP4Bit (NeurIPS 2024),
    section 3; packet layout: `thinwire.codecs.layout`.
    """

    bits: int = 4
    group: int = 128
    rounding: str = "stochastic"
    scale: str = "fp32"

    def __post_init__(self) -> None:
        check_types(self)
        checks.width("integer bits", self.bits, WIDTHS)
        checks.one_of("integer rounding", self.rounding, ROUNDINGS)
        self.check_groups("integer")

    @property
    def levels(self) -> int:
        """M: codes run from -M to M."""
        return (1 << self.bits - 1) - 1

    @property
    def traits(self) -> Traits:
        """Nearest is a contraction: no element's error exceeds the element, and the largest one's is near 0.

        Stochastic rounding is unbiased; E|C(x) - x|^2 <= (group/4) (s/M)^2 is below |x|^2 for the worst x
        exactly where group <= 4 M^2, so there it is a contraction in expectation over the seed (a bf16 scale
        is up to 2^-7 larger). The noise stays below 1/2, so that it moves no zero.
        """
        if self.rounding == "nearest":
            return Traits(contraction=True, keeps_zeros=1)
        worst = self.group if self.scale == "fp32" else self.group * (1 + 2**-7) ** 2
        return Traits(unbiased=True, contraction=worst <= 4 * self.levels**2, draws=True, keeps_zeros=1)

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        return self.encode_rotated(x, rotation=0, seed=seed, counters=[counter], out=out)

    def encode_rows(self, rows: Tensor, numbers: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        counters = backends.row_counters(numbers, rows.shape[1], self.block)
        return self.encode_rotated(rows, rotation=0, seed=seed, counters=counters, out=out)

    def encode_rotated(
        self, x: Tensor, *, rotation: int, seed: int, counters: Sequence[int] | np.ndarray, out: Tensor | None
    ) -> Tensor:
        """Encode H x with Hadamard rows of length `rotation`, 0 for none; x is zero-padded to whole rows.

        counters: the number of the first element of each equal piece of x.
        """
        out = backends.packet_buffer(out, self._rotated_bytes(x.numel(), rotation), x.device)
        self.encode_all_rotated([x], [out], rotation=rotation, seed=seed, counters=counters)
        return out

    def encode_all(
        self, xs: Sequence[Tensor], outs: Sequence[Tensor], *, seed: int = 0, counters: Sequence[int]
    ) -> None:
        self.encode_all_rotated(xs, outs, rotation=0, seed=seed, counters=counters)

    def encode_all_rotated(
        self, xs: Sequence[Tensor], outs: Sequence[Tensor], *, rotation: int, seed: int,
        counters: Sequence[int] | np.ndarray,
    ) -> None:  # fmt: skip
        """`encode_all` of H x, as `encode_rotated`."""
        flat = [backends.flat_fp32(x) for x in xs]
        num_elements = flat[0].numel()
        num_bytes = self._rotated_bytes(num_elements, rotation)
        for x, out in zip(flat, outs, strict=True):
            backends.check("x", x, num_elements, torch.float32)
            backends.check("out", out, num_bytes, torch.uint8)
        is_stochastic = self.rounding == "stochastic"
        backends.encode(
            flat, outs, self.groups, rotation=rotation, is_stochastic=is_stochastic, seed=seed, counters=counters
        )

    def _rotated_bytes(self, num_elements: int, rotation: int) -> int:
        return self.packet_bytes(num_elements + (-num_elements % rotation if rotation else 0))

    def marks(self, packet: Tensor, num_elements: int) -> Tensor | None:
        return self._scale_bits(packet, num_elements) < 0 if self.has_marks([packet], num_elements) else None

    def has_marks(self, packets: Sequence[Tensor], num_elements: int) -> bool:
        return backends.is_any_marked(packets, self.groups, num_elements)

    def encode_marked(self, x: Tensor, marks: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor) -> Tensor:
        """See Codec. What has no scale, zero or NaN, is the same with and without a mark."""
        self.encode(x, seed=seed, counter=counter, out=out)
        bits = self._scale_bits(out, x.numel())
        is_scale = (bits > 0) & (bits < INF_BITS >> self.groups.shift)
        bits.bitwise_or_((marks & is_scale) * torch.iinfo(bits.dtype).min)
        return out

    def _scale_bits(self, packet: Tensor, num_elements: int) -> Tensor:
        """The packet's scales as the whole numbers of their bits: a view."""
        end, _, _ = self.groups.sections(num_elements)
        return packet[:end].view(torch.int16 if self.groups.bf16 else torch.int32)

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        backends.decode([[packet]], [out], self.groups, add=add)
        return out

    def decode_sum(self, packets: Sequence[Tensor], out: Tensor, *, add: bool = False) -> Tensor:
        num_bytes = self.packet_bytes(out.numel())
        for packet in packets:
            backends.check_buffers(packet, num_bytes, out, out.numel())
        backends.decode([packets], [out], self.groups, add=add)
        return out

    def decode_all(self, packets: Sequence[Tensor], outs: Sequence[Tensor], *, add: bool = False) -> None:
        num_elements = outs[0].numel()
        num_bytes = self.packet_bytes(num_elements)
        for packet, out in zip(packets, outs, strict=True):
            backends.check_buffers(packet, num_bytes, out, num_elements)
        backends.decode([[packet] for packet in packets], outs, self.groups, add=add)

    def backend(self, device: torch.device) -> str:
        return backends.name(device)
