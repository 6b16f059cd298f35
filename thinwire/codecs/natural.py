"""Powers of two below each group's maximum: floats without a mantissa, from ternary to E3M0 to 7-bit exponents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks, reference
from thinwire.codecs.base import Traits
from thinwire.codecs.grouped import SCALES, Grouped
from thinwire.codecs.integer import ROUNDINGS, WIDTHS
from thinwire.codecs.random import draws
from thinwire.codecs.spelling import Number, Word, spelled
from thinwire.errors import check_types


@spelled(
    Number("bits", "e", "m0", read=lambda exponent: int(exponent) + 1, write=lambda bits: str(bits - 1)),
    Word("scale", SCALES),
    Word("rounding", ROUNDINGS),
    group="group",
)
@dataclass(frozen=True)
class Natural(Grouped):
    """decoded = 0 or +-2^(|code| - M) s, |code| = 1..M, s = max|x| of the group, M = 2^(bits-1) - 1.

    bits: 2 is ternary (0, +-s), 4 is the E3M0 float (0, +-s .. +-s/64), 8 reaches down to 2^-126 s. rounding: between
    two neighbours a < |x| < b, "stochastic" goes up with probability (|x| - a)/(b - a), "nearest" from the middle up;
    0 is the neighbour below the least power. group, scale ("fp32", or "bf16" rounded up), tiny groups and NaN: as
    Integer. Raises ConfigError for other values.

    Source: natural compression and dithering, Horvath, Ho, Horvath, Sahu, Canini and Richtarik (MSML 2022), here with
    a scale for each group; ternary: TernGrad (NeurIPS 2017); E3M0: Streaming DiLoCo (2025).
    """

    bits: int = 4
    group: int = 128
    rounding: str = "stochastic"
    scale: str = "fp32"

    def __post_init__(self) -> None:
        check_types(self)
        checks.width("natural bits", self.bits, WIDTHS)
        checks.one_of("natural rounding", self.rounding, ROUNDINGS)
        self.check_groups("natural")

    @property
    def traits(self) -> Traits:
        """Nearest is a contraction: no element's error exceeds the element, and the largest one's is near 0.

        Stochastic rounding errs by (|x| - a)(b - |x|) in the mean: at most x^2/8 between powers of two, |x|(l - |x|)
        below the least one, l = 2^(1-M) s. The worst x has |x| = l/4 in all but one element, where the error exceeds
        |x|^2 by (group - 1) l^2/8 - s^2: a contraction in expectation where group <= 8 * 4^(M-1) (a bf16 scale makes
        l up to 2^-7 larger, and rounds the maximum itself).
        """
        if self.rounding == "nearest":
            return Traits(contraction=True, keeps_zeros=1)
        worst = self.group if self.scale == "fp32" else self.group * 1.03
        is_contraction = worst <= 8 * 4.0 ** ((1 << self.bits - 1) - 2)
        return Traits(unbiased=True, contraction=is_contraction, draws=True, keeps_zeros=1)

    @property
    def code_bits(self) -> int:
        return self.bits

    def encode(self, x: Tensor, *, seed: int = 0, counter: int = 0, out: Tensor | None = None) -> Tensor:
        return self._encode(x, backends.as_counters([counter]), seed, out)

    def encode_rows(self, rows: Tensor, numbers: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        return self._encode(rows, backends.row_counters(numbers, rows.shape[1], self.block), seed, out)

    def _encode(self, x: Tensor, counters: np.ndarray, seed: int, out: Tensor | None) -> Tensor:
        """counters: the number of the first element of each equal piece of x."""
        flat = backends.flat_fp32(x)
        num, groups = flat.numel(), self.groups
        rounding = backends.rounding(self.rounding == "stochastic", seed)
        out = backends.packet_buffer(out, self.packet_bytes(num), flat.device)
        kernels = backends.numba_module("grouped", flat.device)
        if kernels is None:
            keys, low = backends.keys_of(seed, counters, num, flat.device)

            def quantise(rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
                random = draws(keys, low + start, rows.numel()).view(rows.shape) if rounding.is_stochastic else None
                return reference.quantise_powers(rows, random, self.bits, groups.bf16)

            reference.encode_groups(quantise, flat, out, groups)
            return out
        scales, codes, rest = backends.sections(out.numpy(), num, groups)
        rest[:] = 0
        scratch = np.empty(min(self.group, num), np.int32), np.empty(min(self.group, num) + 8, np.uint8)
        kernels.encode_powers(flat.numpy(), scales, codes, groups, rounding, counters, *scratch)
        return out

    def _decode(self, packet: Tensor, out: Tensor, *, add: bool) -> Tensor:
        groups = self.groups
        kernels = backends.numba_module("grouped", packet.device)
        if kernels is None:

            def dequantise(rows: Tensor, scales: Tensor, packed: Tensor) -> None:
                reference.store(rows, reference.dequantise_powers(scales, packed, rows.shape[1], self.bits), add)

            reference.decode_groups(dequantise, packet, out, groups)
            return out
        scales, codes, _ = backends.sections(packet.numpy(), out.numel(), groups)
        scratch = np.empty(min(self.group, out.numel()) + 8, np.uint8)
        kernels.decode_powers(scales, codes, out.detach().numpy(), groups, add, scratch)
        return out

    def backend(self, device: torch.device) -> str:
        return backends.numba_or_torch(device)
