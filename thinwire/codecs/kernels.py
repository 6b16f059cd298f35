"""numba kernels for CPU: one pass over memory, the GIL released, results bit-equal to `reference`.

They work group by group in scratch that stays in the first-level cache. Three habits make them vectorise: a
group's maximum is an integer maximum over the floats' bits, adding 1.5 * 2^23 rounds a float to even and
leaves the integer in its low bits, and arrays are indexed by an unsigned offset (a slice would count a
reference, a signed index is checked for wrapping around). No fastmath: it would change roundings. numba's
cache on disk watches a kernel's own file only: after a change to what it imports (constants here, functions
here that another `kernels_` file uses), delete `__pycache__/*.nb*`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from thinwire.codecs.layout import LANES
from thinwire.codecs.random import (
    GAMMA,
    MIX32_A,
    MIX32_B,
    MIX64_A,
    MIX64_B,
)
from thinwire.codecs.reference import MAX_SCALE, TINY

ABS = np.int32(0x7FFFFFFF)
INF_BITS = np.int32(0x7F800000)
NAN_BITS = np.int32(0x7FC00000)
MAX_BITS = np.float32(MAX_SCALE).view(np.int32)
TINY_BITS = np.float32(TINY).view(np.int32)
MAGIC = np.float32(1.5 * 2**23)
MAGIC_BITS = MAGIC.view(np.int32)
NOISE_STEP = np.float32(2.0**-24)
A32, B32 = np.uint32(MIX32_A), np.uint32(MIX32_B)
A64, B64, GAMMA64 = np.uint64(MIX64_A), np.uint64(MIX64_B), np.uint64(GAMMA)
R8, R9, R13, R16, ONE32 = np.int32(8), np.int32(9), np.uint32(13), np.uint32(16), np.int32(1)
HALF_DRAWS, LAST_DRAW = np.int32(1 << 22), np.int32((1 << 23) - 1)
R27, R30, R31, R32, R63 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32), np.uint64(63)
LOW32 = np.uint64(0xFFFFFFFF)
ZERO, ONE, THREE, FOUR = np.uint64(0), np.uint64(1), np.uint64(3), np.uint64(4)
C32, C64, C96, C128, C192 = np.uint64(32), np.uint64(64), np.uint64(96), np.uint64(128), np.uint64(192)
LANE_BYTES = tuple(LANES.get(bits, (1, 0))[1] for bits in range(9))
LANE_SHIFT = tuple(LANES.get(bits, (1, 0))[0].bit_length() - 1 for bits in range(9))

# What an argument is inside a kernel; callers may pass any integer for U64 and I32.
Array: TypeAlias = np.ndarray
U64: TypeAlias = Any
I32: TypeAlias = Any
F32: TypeAlias = Any

# Nothing here allocates; without _nrt=False every inlined call would count references, at half of the speed.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
inlined = njit(**OPTIONS, forceinline=True)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call and keep the result on disk, where any folder for it is writable."""
    try:
        return njit(**OPTIONS, cache=True)(function)
    except RuntimeError as error:
        warnings.warn(f"codecs are compiled anew by every process: {error}; set NUMBA_CACHE_DIR", stacklevel=2)
        return njit(**OPTIONS)(function)


@inlined
def _mix64(z: U64) -> U64:
    z = (z ^ (z >> R30)) * A64
    z = (z ^ (z >> R27)) * B64
    return z ^ (z >> R31)


@inlined
def _key(seed: U64, high: U64) -> U64:
    """derive_seed(seed, high)."""
    return _mix64((_mix64(GAMMA64 ^ seed) + GAMMA64) ^ high)


@inlined
def _peak_bits(x: Array, start: U64, size: U64) -> I32:
    """The bits of max|x| as an integer; above INF_BITS where x holds a NaN."""
    peak = np.int32(0)
    for j in range(size):
        peak = max(peak, np.int32(np.float32(x[start + j]).view(np.int32) & ABS))
    return peak


@inlined
def _scale_bits(peak: I32, shift: I32) -> I32:
    """What the wire stores of `reference.scales_of`: the upper 32 - shift bits."""
    if peak >= INF_BITS:
        return NAN_BITS >> shift
    if peak < TINY_BITS:
        return np.int32(0)
    return np.int32(min(peak, MAX_BITS) + ((1 << shift) - 1)) >> shift


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
    _dither(x, start, before, factor, levels, codes, at, _key(seed, high), low, step)
    if before < size:
        key = _key(seed, (high + ONE) & LOW32)
        _dither(x, start + before, size - before, factor, levels, codes, at + before, key, ZERO, step)


@inlined
def _draws_below(out: Array, start: U64, size: U64, key: U64, counter: U64, flip: I32) -> None:
    k0, k1, first = np.uint32(key), np.uint32(key >> R32), np.uint32(counter)
    for j in range(size):
        h = np.uint32(np.uint32(first + np.uint32(j)) ^ k0)
        h = np.uint32(np.uint32(h ^ (h >> R16)) * A32)
        h = np.uint32(np.uint32(h ^ (h >> R13) ^ k1) * B32)
        out[start + j] = ((np.int32(h) >> R9) + HALF_DRAWS) ^ flip


@inlined
def fill_draws(out: Array, size: U64, seed: U64, counter: U64) -> None:
    """out[:size] = `random.draws`, int32."""
    mirrored = seed >> R63
    flip = LAST_DRAW if mirrored else np.int32(0)
    seed = seed ^ (ZERO - mirrored)
    high, low = counter >> R32, counter & LOW32
    before = min(size, LOW32 + ONE - low)
    _draws_below(out, ZERO, before, _key(seed, high), low, flip)
    if before < size:
        _draws_below(out, before, size - before, _key(seed, (high + ONE) & LOW32), ZERO, flip)


@inlined
def _pack(codes: Array, width: U64, bits: I32, out: Array, at: U64) -> None:
    """Codes in planes of `width`, two's complement in bytes -> `layout`'s bytes in out from `at` on."""
    w2, w3 = width + width, width + width + width
    if bits == 4:
        for j in range(width):
            out[at + j] = np.uint8((codes[j] & 15) | (codes[width + j] << 4))
    elif bits == 2:
        for j in range(width):
            low = (codes[j] & 3) | (codes[width + j] & 3) << 2
            out[at + j] = np.uint8(low | (codes[w2 + j] & 3) << 4 | (codes[w3 + j] & 3) << 6)
    else:
        if bits == 3:
            for k in range(np.uint64(4)):
                for j in range(width):
                    low, high = codes[(k + k) * width + j], codes[(k + k + ONE) * width + j]
                    codes[k * width + j] = np.uint8((low & 7) | (high & 7) << 3)
        for k in range(np.uint64(3)):
            for j in range(width):
                fourth = (codes[w3 + j] >> (k + k)) & 3
                out[at + k * width + j] = np.uint8((codes[k * width + j] & 63) | fourth << 6)


@inlined
def _signed(byte: I32, skip: I32, bits: I32) -> I32:
    """`bits` bits of a byte, after the `skip` upper ones, sign-extended."""
    return np.uint8(np.int8(byte << skip) >> (8 - bits))


@inlined
def _unpack(packet: Array, at: U64, width: U64, bits: I32, codes: Array) -> None:
    """The inverse of `_pack` for 2, 3 and 6 bits: codes sign-extended to a byte."""
    w2, w3 = width + width, width + width + width
    if bits == 2:
        for j in range(width):
            byte = packet[at + j]
            codes[j], codes[width + j] = _signed(byte, 6, 2), _signed(byte, 4, 2)
            codes[w2 + j], codes[w3 + j] = _signed(byte, 2, 2), _signed(byte, 0, 2)
    else:
        for j in range(width):
            b0, b1, b2 = packet[at + j], packet[at + width + j], packet[at + w2 + j]
            b3 = (b0 >> 6) | (b1 >> 6) << 2 | (b2 >> 6) << 4
            if bits == 6:
                codes[j], codes[width + j] = _signed(b0, 2, 6), _signed(b1, 2, 6)
                codes[w2 + j], codes[w3 + j] = _signed(b2, 2, 6), _signed(b3, 2, 6)
            else:
                codes[j], codes[width + j] = _signed(b0, 5, 3), _signed(b0, 2, 3)
                codes[w2 + j], codes[w3 + j] = _signed(b1, 5, 3), _signed(b1, 2, 3)
                codes[w2 + w2 + j], codes[w2 + w3 + j] = _signed(b2, 5, 3), _signed(b2, 2, 3)
                codes[w3 + w3 + j], codes[w3 + w3 + width + j] = _signed(b3, 5, 3), _signed(b3, 2, 3)


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
def rotate_inplace(x: Array, block: U64, scale: F32, work: Array) -> None:
    """x <- H x for whole rows; `work` holds 4 chunks (a chunk is 128 for rows of 32, else one row)."""
    block, num = np.uint64(block), np.uint64(x.size)
    chunk = C128 if block == C32 else block
    whole = num // chunk * chunk
    _rotate(x, ZERO, whole, block, scale, work, x, ZERO)
    if whole < num:
        spare = THREE * chunk
        _rotate(x, whole, num - whole, block, scale, work, work, spare)
        for j in range(num - whole):
            x[whole + j] = work[spare + j]


@inlined
def _encode_group(
    x: Array,
    start: U64,
    size: U64,
    width: U64,
    bits: I32,
    shift: I32,
    scales: Array,
    index: U64,
    out: Array,
    at: U64,
    codes: Array,
    stochastic: bool,
    seed: U64,
    counter: U64,
) -> None:
    """One group's scale to scales[index] and its codes to out[at:]."""
    levels = np.int32((1 << (bits - 1)) - 1)
    stored = _scale_bits(_peak_bits(x, start, size), shift)
    scales[index] = stored
    if stored == 0 or stored >= INF_BITS >> shift:
        for j in range(width * np.uint64(LANE_BYTES[bits])):
            out[at + j] = np.uint8(0)
        return
    factor = np.float32(levels) / np.int32(stored << shift).view(np.float32)
    if stochastic:
        if bits == 8:
            _round_dithered(x, start, size, factor, levels, out, at, seed, counter)
        else:
            _round_dithered(x, start, size, factor, levels, codes, ZERO, seed, counter)
    elif bits == 8:
        _round(x, start, size, factor, levels, out, at)
    else:
        _round(x, start, size, factor, levels, codes, ZERO)
    if bits != 8:
        for j in range(size, width << np.uint64(LANE_SHIFT[bits])):
            codes[j] = np.uint8(0)
        _pack(codes, width, bits, out, at)


@kernel
def encode(
    x: Array,
    num: U64,
    scales: Array,
    out: Array,
    bits: I32,
    group: U64,
    shift: I32,
    block: U64,
    block_scale: F32,
    stochastic: bool,
    seed: U64,
    counter: U64,
    rows: Array,
    work: Array,
    codes: Array,
) -> None:
    """Flat fp32 x, as `num` elements with zeros beyond its end -> scales (int32 or int16 bits) and codes.

    block: Hadamard rows, 0 for none. rows: fp32 scratch for one group and a chunk. work: 4 chunks. codes:
    uint8, one group.
    """
    num, group, block, at = np.uint64(num), np.uint64(group), np.uint64(block), ZERO
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        position = counter + start
        if block:
            _rotate(x, start, size, block, block_scale, work, rows, ZERO)
            _encode_group(
                rows,
                ZERO,
                size,
                width,
                bits,
                shift,
                scales,
                index,
                out,
                at,
                codes,
                stochastic,
                seed,
                position,
            )
        else:
            _encode_group(x, start, size, width, bits, shift, scales, index, out, at, codes, stochastic, seed, position)
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
    """`_unpack` and `_write` in one for 4 bits: a quarter less time in cache than by way of scratch."""
    upper, rest = start + width, size - width
    if add:
        for j in range(width):
            out[start + j] += np.float32(np.int8(_signed(packed[at + j], 4, 4))) * step
        for j in range(rest):
            out[upper + j] += np.float32(np.int8(_signed(packed[at + j], 0, 4))) * step
    else:
        for j in range(width):
            out[start + j] = np.float32(np.int8(_signed(packed[at + j], 4, 4))) * step
        for j in range(rest):
            out[upper + j] = np.float32(np.int8(_signed(packed[at + j], 0, 4))) * step


@kernel
def decode(
    scales: Array, packed: Array, out: Array, bits: I32, group: U64, shift: I32, add: bool, codes: Array
) -> None:
    """Scales and packed codes -> out = values, or out += values. codes: uint8 scratch, one group."""
    num, group, at = np.uint64(out.size), np.uint64(group), ZERO
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    levels = np.float32((1 << (bits - 1)) - 1)
    for index in range(np.uint64(scales.size)):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        step = np.int32(np.int32(scales[index]) << shift).view(np.float32) / levels
        if bits == 8:
            _write(packed, at, size, step, add, out, start)
        elif bits == 4:
            _write_4(packed, at, size, width, step, add, out, start)
        else:
            _unpack(packed, at, width, bits, codes)
            _write(codes, ZERO, size, step, add, out, start)
        at += width * lane_bytes
