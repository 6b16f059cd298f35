"""One byte for one projected gradient: a sign and a logarithm."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

SKIP = 0
STEPS_PER_E, LARGEST_EXPONENT = 8, 63
MAX_SLOPE = math.exp(LARGEST_EXPONENT / STEPS_PER_E)


@functools.cache
def values() -> Tensor:
    """The values of the 256 bytes, fp64. With sign s in bit 7 and m in the others: s exp((m - 64) / 8), 0 for m = 0.

    Rounded to 16 bits, so that differences of the machines' exponential functions don't matter.
    """
    table = torch.zeros(256, dtype=torch.float64)
    for exponent in range(-LARGEST_EXPONENT, LARGEST_EXPONENT + 1):
        fraction, power = math.frexp(math.exp(exponent / STEPS_PER_E))
        value = math.ldexp(round(fraction * 2**16), power - 16)
        table[64 + exponent], table[192 + exponent] = value, -value
    return table


def encode(slopes: Tensor) -> Tensor:
    """Encode slopes, fp64 [n], as uint8 [n]: the nearest exponent; SKIP for zero, NaN, inf and values below e^-7.94.

    |decoded - p| <= (e^(1/16) - 1) |p| = 0.0645 |p| up to MAX_SLOPE = 2630. Larger values are encoded as MAX_SLOPE.
    """
    exponents = (slopes.abs().log() * STEPS_PER_E).round().clamp(max=LARGEST_EXPONENT)
    valid = slopes.isfinite() & (exponents >= -LARGEST_EXPONENT)
    codes = exponents.masked_fill(~valid, 0.0) + 64 + 128 * (slopes < 0)
    return codes.masked_fill(~valid, SKIP).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Decode uint8 [...] to fp64 of the same shape; 0 for a skipped sample."""
    return values()[codes.long()]
