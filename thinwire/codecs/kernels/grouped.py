"""Sign and Natural, bit-equal to `reference`."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import (
    F32,
    I32,
    INF_BITS,
    LANE_BYTES,
    LANE_SHIFT,
    MAX_BITS,
    NAN_BITS,
    ONE,
    U64,
    ZERO,
    Array,
    fill_draws,
    inlined,
    kernel,
    pack,
    peak_bits,
    scale_bits,
    unpack,
)
from thinwire.codecs.layout import Groups, Rounding

SIGN = np.int32(-(1 << 31))
EIGHT, SEVEN = np.uint64(8), np.uint64(7)
FRACTION = np.int32(23)
HALF = np.int32(1 << 22)
FRACTION_SCALE = np.float32(2.0**23)


@inlined
def _fold(x: Array, start: U64, size: U64, squared: bool, sums: Array) -> F32:
    """`reference.fold` of |x| or x^2 in fp64; `sums` has room for half of the next power of two."""
    half = ONE
    while half + half < size:
        half += half
    both = size - half if size > half else ZERO
    for j in range(min(half, size)):
        value = np.float64(x[start + j])
        sums[j] = value * value if squared else abs(value)
    for j in range(both):
        value = np.float64(x[start + half + j])
        sums[j] += value * value if squared else abs(value)
    half = half >> ONE if size > ONE else ZERO
    while half:
        for j in range(half):
            sums[j] += sums[half + j]
        half = half >> ONE
    return sums[ZERO]


@inlined
def _mean_bits(x: Array, start: U64, size: U64, squared: bool, shift: I32, sums: Array) -> I32:
    """What the wire stores of `reference.mean_scales`: the upper 32 - shift bits."""
    mean = _fold(x, start, size, squared, sums) / np.float64(size)
    if not mean < np.inf:
        return NAN_BITS >> shift
    bits = np.float32(np.sqrt(mean) if squared else mean).view(np.int32)
    if shift:
        bits = np.int32(min(bits, MAX_BITS) + 0x7FFF + ((bits >> 16) & 1))
    return bits >> shift


@kernel
def encode_signs(x: Array, scales: Array, out: Array, groups: Groups, squared: bool, sums: Array) -> None:
    """Flat fp32 x -> scales (int32 or int16 bits) and sign bits. sums: fp64 scratch, a group's power of two."""
    shift, num, group, at = groups.shift, np.uint64(x.size), np.uint64(groups.size), ZERO
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + SEVEN) // EIGHT
        stored = _mean_bits(x, start, size, squared, shift, sums)
        scales[index] = stored
        valid = stored != NAN_BITS >> shift
        for j in range(width):
            out[at + j] = np.uint8(0)
        for plane in range(EIGHT if valid else ZERO):
            first = plane * width
            for j in range(min(width, size - first) if size > first else ZERO):
                out[at + j] |= np.uint8(x[start + first + j] < np.float32(0)) << np.uint8(plane)
        at += width


@kernel
def decode_signs(scales: Array, packed: Array, out: Array, groups: Groups, add: bool) -> None:
    """Scales and sign bits -> out = values, or out += values."""
    shift, num, group, at = groups.shift, np.uint64(out.size), np.uint64(groups.size), ZERO
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + SEVEN) // EIGHT
        scale = np.int32(np.int32(scales[index]) << shift)
        for plane in range(EIGHT):
            first = plane * width
            place, left = np.int32(31) - np.int32(plane), start + first
            count = min(width, size - first) if size > first else ZERO
            if add:
                for j in range(count):
                    sign = np.int32(np.int32(packed[at + j]) << place) & SIGN
                    out[left + j] += np.int32(scale ^ sign).view(np.float32)
            else:
                for j in range(count):
                    sign = np.int32(np.int32(packed[at + j]) << place) & SIGN
                    out[left + j] = np.int32(scale ^ sign).view(np.float32)
        at += width


@inlined
def _powers(x: Array, start: U64, size: U64, scale: F32, levels: I32, draws: Array, codes: Array, at: U64) -> None:
    """codes = those of `reference.quantise_powers`, two's complement in bytes."""
    inverse = np.float32(1) / scale
    least, lift = np.float32(2.0) ** np.float32(1 - levels), np.float32(2.0) ** np.float32(levels - 1)
    edge, offset = np.int32(128 - levels) << FRACTION, np.int32(127 - levels)
    for j in range(size):
        y = np.float32(abs(x[start + j]) * inverse)
        fields = y.view(np.int32)
        below = np.int32(np.float32(min(y, least) * lift) * FRACTION_SCALE)
        above = np.int32((np.int32(fields + draws[j]) >> FRACTION) - offset)
        code = above if fields >= edge else np.int32(np.int32(below + draws[j]) >> FRACTION)
        code = min(code, levels)
        codes[at + j] = np.uint8(-code if x[start + j] < np.float32(0) else code)


@kernel
def encode_powers(
    x: Array, scales: Array, out: Array, groups: Groups, rounding: Rounding, counters: Array, draws: Array, codes: Array
) -> None:
    """Flat fp32 x -> scales (int32 or int16 bits) and codes.

    counters: uint64, the number of the first element of each of the equal pieces of x. draws: int32, one group; codes:
    uint8, one group.
    """
    bits, shift, num, group, at = groups.bits, groups.shift, np.uint64(x.size), np.uint64(groups.size), ZERO
    levels, piece = np.int32((1 << (bits - 1)) - 1), num // max(np.uint64(counters.size), ONE)
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    if not rounding.is_stochastic:
        for j in range(np.uint64(draws.size)):
            draws[j] = HALF
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        stored = scale_bits(peak_bits(x, start, size), shift)
        scales[index] = stored
        if stored == 0 or stored >= INF_BITS >> shift:
            for j in range(width * lane_bytes):
                out[at + j] = np.uint8(0)
        else:
            if rounding.is_stochastic:
                at_piece = start // piece
                fill_draws(draws, size, rounding.seed, counters[at_piece] + (start - at_piece * piece))
            scale = np.int32(stored << shift).view(np.float32)
            if bits == 8:
                _powers(x, start, size, scale, levels, draws, out, at)
            else:
                _powers(x, start, size, scale, levels, draws, codes, ZERO)
                for j in range(size, width << lane_shift):
                    codes[j] = np.uint8(0)
                pack(codes, width, bits, out, at)
        at += width * lane_bytes


@inlined
def _power(code: I32, offset: I32, scale: F32) -> F32:
    """+-2^(|code| - M) s, or a signed zero times s, for a code in two's complement."""
    signed = np.int32(np.int8(code))
    size = abs(signed)
    bits = np.int32(np.int32(size + offset) << FRACTION) if size else np.int32(0)
    return np.int32(bits | (signed & SIGN)).view(np.float32) * scale


@kernel
def decode_powers(scales: Array, packed: Array, out: Array, groups: Groups, add: bool, codes: Array) -> None:
    """Scales and packed codes -> out = values, or out += values. codes: uint8 scratch, one group."""
    bits, shift, num, group, at = groups.bits, groups.shift, np.uint64(out.size), np.uint64(groups.size), ZERO
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    offset = np.int32(128 - (1 << (bits - 1)))
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        scale = np.int32(np.int32(scales[index]) << shift).view(np.float32)
        if bits == 8:
            for j in range(size):
                codes[j] = packed[at + j]
        elif bits == 4:
            for j in range(width):
                byte = packed[at + j]
                codes[j], codes[width + j] = np.uint8(np.int8(byte << 4) >> 4), np.uint8(np.int8(byte) >> 4)
        else:
            unpack(packed, at, width, bits, codes)
        if add:
            for j in range(size):
                out[start + j] += _power(codes[j], offset, scale)
        else:
            for j in range(size):
                out[start + j] = _power(codes[j], offset, scale)
        at += width * lane_bytes
