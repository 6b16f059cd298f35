"""Integers and rotations, bit-equal to `reference`."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import (
    A32,
    ABS,
    B32,
    C32,
    C64,
    C96,
    C128,
    C192,
    F32,
    FOUR,
    I32,
    INF_BITS,
    LANE_BYTES,
    LANE_SHIFT,
    LOW32,
    MAGIC,
    MAGIC_BITS,
    NOISE_STEP,
    ONE,
    ONE32,
    R8,
    R13,
    R16,
    R32,
    R63,
    THREE,
    U64,
    ZERO,
    Array,
    draw_key,
    inlined,
    kernel,
    pack,
    peak_bits,
    scale_bits,
    signed,
    unpack,
)
from thinwire.codecs.layout import Groups, Rounding

# The sign bit of a scale.
MARK = np.int32(-(1 << 31))


@inlined
def _round(x: Array, start: U64, size: U64, factor: F32, levels: I32, codes: Array, at: U64) -> None:
    """codes = clamp(round(x * factor), -levels, levels) in two's complement."""
    low, high = np.int32(MAGIC_BITS - levels), np.int32(MAGIC_BITS + levels)
    for j in range(size):
        bits = np.float32(x[start + j] * factor + MAGIC).view(np.int32)
        codes[at + j] = np.uint8(min(max(bits, low), high))


@inlined
def _dither(
    x: Array,
    start: U64,
    size: U64,
    factor: F32,
    levels: I32,
    codes: Array,
    at: U64,
    key: U64,
    counter: U64,
    step: F32,
) -> None:
    low, high = np.int32(MAGIC_BITS - levels), np.int32(MAGIC_BITS + levels)
    k0, k1, first = np.uint32(key), np.uint32(key >> R32), np.uint32(counter)
    for j in range(size):
        h = np.uint32(np.uint32(first + np.uint32(j)) ^ k0)
        h = np.uint32(np.uint32(h ^ (h >> R16)) * A32)
        h = np.uint32(np.uint32(h ^ (h >> R13) ^ k1) * B32)
        dither = np.float32((np.int32(h) >> R8) | ONE32) * step
        bits = np.float32(np.float32(x[start + j] * factor + dither) + MAGIC).view(np.int32)
        codes[at + j] = np.uint8(min(max(bits, low), high))


@inlined
def _round_dithered(
    x: Array,
    start: U64,
    size: U64,
    factor: F32,
    levels: I32,
    codes: Array,
    at: U64,
    seed: U64,
    counter: U64,
) -> None:
    """As `_round` with `random.noise` added; the upper half of the counter changes at most once in a group."""
    mirrored = seed >> R63
    step = -NOISE_STEP if mirrored else NOISE_STEP
    seed = seed ^ (ZERO - mirrored)
    high, low = counter >> R32, counter & LOW32
    before = min(size, LOW32 + ONE - low)
    _dither(x, start, before, factor, levels, codes, at, draw_key(seed, high), low, step)
    if before < size:
        key = draw_key(seed, (high + ONE) & LOW32)
        _dither(x, start + before, size - before, factor, levels, codes, at + before, key, ZERO, step)


@inlined
def _row_scale(block: U64) -> F32:
    return np.float32(1 / np.sqrt(np.float64(block)))


@inlined
def _rotate_32(x: Array, at: U64, scale: F32, work: Array, out: Array, to: U64) -> None:
    """Four rows of 32 at once: `reference.hadamard` with constant offsets, then the rows taken apart.

    Each stage moves the lowest bit of the element's index to the top, so after five the row number is the
    lowest two bits.
    """
    for j in range(C64):
        even, odd = x[at + j + j], x[at + j + j + ONE]
        work[j], work[C64 + j] = even + odd, even - odd
    for j in range(C64):
        even, odd = work[j + j], work[j + j + ONE]
        work[C128 + j], work[C192 + j] = even + odd, even - odd
    for j in range(C64):
        even, odd = work[C128 + j + j], work[C128 + j + j + ONE]
        work[j], work[C64 + j] = even + odd, even - odd
    for j in range(C64):
        even, odd = work[j + j], work[j + j + ONE]
        work[C128 + j], work[C192 + j] = even + odd, even - odd
    for j in range(C64):
        even, odd = work[C128 + j + j], work[C128 + j + j + ONE]
        work[j], work[C64 + j] = even + odd, even - odd
    for j in range(C32):
        k = FOUR * j
        out[to + j] = work[k] * scale
        out[to + C32 + j] = work[k + ONE] * scale
        out[to + C64 + j] = work[k + ONE + ONE] * scale
        out[to + C96 + j] = work[k + THREE] * scale


@inlined
def _rotate_row(x: Array, at: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> None:
    """One row of any power of two, as `reference.hadamard`."""
    half, here, there = block >> ONE, ZERO, block
    for j in range(block):
        work[j] = x[at + j]
    width = ONE
    while width < block:
        for j in range(half):
            even, odd = work[here + j + j], work[here + j + j + ONE]
            work[there + j], work[there + half + j] = even + odd, even - odd
        here, there, width = there, here, width + width
    for j in range(block):
        out[to + j] = work[here + j] * scale


@inlined
def _rotate_chunk(x: Array, at: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> None:
    if block == C32:
        _rotate_32(x, at, scale, work, out, to)
    else:
        _rotate_row(x, at, block, scale, work, out, to)


@inlined
def _rotate(x: Array, at: U64, size: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> None:
    """`size` elements (whole rows) of x, zero beyond its end, rotated to `out`, with room for whole chunks."""
    chunk = C128 if block == C32 else block
    done = ZERO
    while done < size:
        start = at + done
        if start + chunk > np.uint64(x.size):
            valid = np.uint64(x.size) - start if start < np.uint64(x.size) else ZERO
            for j in range(chunk):
                work[chunk + chunk + j] = x[start + j] if j < valid else np.float32(0)
            _rotate_chunk(work, chunk + chunk, block, scale, work, out, to + done)
        else:
            _rotate_chunk(x, start, block, scale, work, out, to + done)
        done += chunk


@kernel
def rotate_inplace(x: Array, block: U64, work: Array) -> None:
    """x <- H x for whole rows; `work` holds 4 chunks (a chunk is 128 for rows of 32, else one row)."""
    scale, block, num = _row_scale(block), np.uint64(block), np.uint64(x.size)
    chunk = C128 if block == C32 else block
    whole = num // chunk * chunk
    _rotate(x, ZERO, whole, block, scale, work, x, ZERO)
    if whole < num:
        spare = THREE * chunk
        _rotate(x, whole, num - whole, block, scale, work, work, spare)
        for j in range(num - whole):
            x[whole + j] = work[spare + j]


@inlined
def _holds_zeros(x: Array, at: U64, size: U64, block: U64) -> bool:
    """Whether one of the rows holds both zeros and other values; beyond the end of x are zeros."""
    found = False
    for row in range(size // block):
        start = at + row * block
        inside = min(block, np.uint64(x.size) - start)
        zeros = np.int32(0)
        for j in range(inside):
            zeros += np.int32(x[start + j] == np.float32(0))
        zeros += np.int32(block - inside)
        found = found or bool((zeros > 0) & (zeros < np.int32(block)))
    return found


@inlined
def _encode_group(
    x: Array,
    start: U64,
    size: U64,
    width: U64,
    stored: I32,
    groups: Groups,
    out: Array,
    at: U64,
    codes: Array,
    rounding: Rounding,
    counter: U64,
) -> None:
    """One group's codes, with the scale that the wire stores, to out[at:]."""
    bits, shift = groups.bits, groups.shift
    if stored == 0 or stored >= INF_BITS >> shift:
        for j in range(width * np.uint64(LANE_BYTES[bits])):
            out[at + j] = np.uint8(0)
        return
    levels = np.int32((1 << (bits - 1)) - 1)
    factor = np.float32(levels) / np.int32(stored << shift).view(np.float32)
    if rounding.is_stochastic:
        if bits == 8:
            _round_dithered(x, start, size, factor, levels, out, at, rounding.seed, counter)
        else:
            _round_dithered(x, start, size, factor, levels, codes, ZERO, rounding.seed, counter)
    elif bits == 8:
        _round(x, start, size, factor, levels, out, at)
    else:
        _round(x, start, size, factor, levels, codes, ZERO)
    if bits != 8:
        for j in range(size, width << np.uint64(LANE_SHIFT[bits])):
            codes[j] = np.uint8(0)
        pack(codes, width, bits, out, at)


@kernel
def encode(
    x: Array,
    scales: Array,
    out: Array,
    groups: Groups,
    block: U64,
    rounding: Rounding,
    rows: Array,
    work: Array,
    codes: Array,
) -> None:
    """Flat fp32 x, with zeros beyond its end up to a whole row -> scales (int32 or int16 bits) and codes.

    A group in which the rotation would blur zeros is left as it is, and the sign bit of its scale is set.

    block: elements of a Hadamard row, 0 for none. Scratch: rows, fp32, one group and a chunk; work, fp32, 4 chunks;
    codes, uint8, one group.
    """
    bits, group, block, at = groups.bits, np.uint64(groups.size), np.uint64(block), ZERO
    num = np.uint64(x.size)
    if block:
        num = (num + block - ONE) // block * block
    block_scale = _row_scale(block)
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        position = rounding.counter + start
        mark = np.int32(0)
        if block:
            if _holds_zeros(x, start, size, block):
                for j in range(size):
                    rows[j] = x[start + j] if start + j < np.uint64(x.size) else np.float32(0)
                mark = MARK >> groups.shift
            else:
                _rotate(x, start, size, block, block_scale, work, rows, ZERO)
            stored = scale_bits(peak_bits(rows, ZERO, size), groups.shift)
            _encode_group(rows, ZERO, size, width, stored, groups, out, at, codes, rounding, position)
            if stored == 0 or stored >= INF_BITS >> groups.shift:
                mark = np.int32(0)
        else:
            stored = scale_bits(peak_bits(x, start, size), groups.shift)
            _encode_group(x, start, size, width, stored, groups, out, at, codes, rounding, position)
        scales[index] = stored | mark
        at += width * lane_bytes


@inlined
def _write(codes: Array, at: U64, size: U64, step: F32, add: bool, out: Array, start: U64) -> None:
    if add:
        for j in range(size):
            out[start + j] += np.float32(np.int8(codes[at + j])) * step
    else:
        for j in range(size):
            out[start + j] = np.float32(np.int8(codes[at + j])) * step


@inlined
def _write_4(packed: Array, at: U64, size: U64, width: U64, step: F32, add: bool, out: Array, start: U64) -> None:
    """`unpack` and `_write` in one for 4 bits: a quarter less time in cache than by way of scratch."""
    upper, rest = start + width, size - width
    if add:
        for j in range(width):
            out[start + j] += np.float32(np.int8(signed(packed[at + j], 4, 4))) * step
        for j in range(rest):
            out[upper + j] += np.float32(np.int8(signed(packed[at + j], 0, 4))) * step
    else:
        for j in range(width):
            out[start + j] = np.float32(np.int8(signed(packed[at + j], 4, 4))) * step
        for j in range(rest):
            out[upper + j] = np.float32(np.int8(signed(packed[at + j], 0, 4))) * step


@kernel
def decode(scales: Array, packed: Array, out: Array, groups: Groups, add: bool, codes: Array) -> None:
    """Scales, whatever their sign, and packed codes -> out = values, or out += values. codes: uint8, one group."""
    bits, num, group, at = groups.bits, np.uint64(out.size), np.uint64(groups.size), ZERO
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    levels = np.float32((1 << (bits - 1)) - 1)
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        step = np.int32(np.int32(np.int32(scales[index]) << groups.shift) & ABS).view(np.float32) / levels
        if bits == 8:
            _write(packed, at, size, step, add, out, start)
        elif bits == 4:
            _write_4(packed, at, size, width, step, add, out, start)
        else:
            unpack(packed, at, width, bits, codes)
            _write(codes, ZERO, size, step, add, out, start)
        at += width * lane_bytes
