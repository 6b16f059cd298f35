"""What the kernels share: numbers as numba needs them, the hash of `random`, scales and packed codes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from thinwire.codecs.kernels.vectors import product
from thinwire.codecs.layout import LANES
from thinwire.codecs.random import DITHER_BITS, GAMMA, MIX32_A, MIX32_B, MIX64_A, MIX64_B, PAIR_MASK
from thinwire.codecs.reference import MAX_SCALE, TINY

ABS = np.int32(0x7FFFFFFF)
INF_BITS = np.int32(0x7F800000)
NAN_BITS = np.int32(0x7FC00000)
MAX_BITS = np.float32(MAX_SCALE).view(np.int32)
TINY_BITS = np.float32(TINY).view(np.int32)
A32, B32 = np.uint32(MIX32_A), np.uint32(MIX32_B)
A64, B64, GAMMA64 = np.uint64(MIX64_A), np.uint64(MIX64_B), np.uint64(GAMMA)
R9, R13, R16, ONE32 = np.int32(9), np.uint32(13), np.uint32(16), np.uint32(1)
HALF_DRAWS, LAST_DRAW = np.int32(1 << 22), np.int32((1 << 23) - 1)
R27, R30, R31, R32, R63 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32), np.uint64(63)
LOW32 = np.uint64(0xFFFFFFFF)
DITHER_SHIFT, TWO_DITHERS = np.int32(DITHER_BITS), np.uint32(PAIR_MASK)
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
def draw_key(seed: U64, high: U64) -> U64:
    """derive_seed(seed, high)."""
    return _mix64((_mix64(GAMMA64 ^ seed) + GAMMA64) ^ high)


@inlined
def peak_bits(x: Array, start: U64, size: U64) -> I32:
    """The bits of max|x| as an integer; above INF_BITS where x holds a NaN."""
    peak = np.int32(0)
    for j in range(size):
        peak = max(peak, np.int32(np.float32(x[start + j]).view(np.int32) & ABS))
    return peak


@inlined
def scale_bits(peak: I32, shift: I32) -> I32:
    """What the wire stores of `reference.scales_of`: the upper 32 - shift bits."""
    if peak >= INF_BITS:
        return NAN_BITS >> shift
    if peak < TINY_BITS:
        return np.int32(0)
    return np.int32(min(peak, MAX_BITS) + ((1 << shift) - 1)) >> shift


@inlined
def _hash32(x: Any, k0: Any, k1: Any) -> Any:
    """`random.hash32`."""
    x = np.uint32(x ^ k0)
    x = product(np.uint32(x ^ (x >> R16)), A32)
    return product(np.uint32(x ^ (x >> R13) ^ k1), B32)


@inlined
def _draws_below(out: Array, start: U64, size: U64, key: U64, counter: U64, flip: I32) -> None:
    k0, k1, first = np.uint32(key), np.uint32(key >> R32), np.uint32(counter)
    for j in range(size):
        h = _hash32(np.uint32(first + np.uint32(j)), k0, k1)
        out[start + j] = ((np.int32(h) >> R9) + HALF_DRAWS) ^ flip


@inlined
def fill_draws(out: Array, size: U64, seed: U64, counter: U64) -> None:
    """out[:size] = `random.draws`, int32."""
    mirrored = seed >> R63
    flip = LAST_DRAW if mirrored else np.int32(0)
    seed = seed ^ (ZERO - mirrored)
    high, low = counter >> R32, counter & LOW32
    before = min(size, LOW32 + ONE - low)
    _draws_below(out, ZERO, before, draw_key(seed, high), low, flip)
    if before < size:
        _draws_below(out, before, size - before, draw_key(seed, (high + ONE) & LOW32), ZERO, flip)


@inlined
def _dithers_below(out: Array, start: U64, size: U64, key: U64, counter: U64, flip: I32) -> None:
    k0, k1, first = np.uint32(key), np.uint32(key >> R32), np.uint32(counter)
    for j in range(size):
        h = _hash32(np.uint32(first + np.uint32(j)), k0, k1)
        out[start + j] = np.uint32(np.uint32(np.uint32(h ^ (h >> R16)) >> ONE32) & TWO_DITHERS) ^ flip


@inlined
def fill_dithers(out: Array, size: U64, seed: U64, counter: U64) -> None:
    """`random.dithers` of elements counter .. counter + size - 1: uint32, two a word; the first may hold one before."""
    mirrored = seed >> R63
    flip = TWO_DITHERS if mirrored else np.uint32(0)
    seed = seed ^ (ZERO - mirrored)
    high, low = counter >> R32, counter & LOW32
    words, left = (size + (low & ONE) + ONE) >> ONE, (LOW32 + ONE - low + ONE) >> ONE
    before = min(words, left)
    _dithers_below(out, ZERO, before, draw_key(seed, high), low >> ONE, flip)
    if before < words:
        _dithers_below(out, before, words - before, draw_key(seed, (high + ONE) & LOW32), ZERO, flip)


@inlined
def pack(codes: Array, width: U64, bits: I32, out: Array, at: U64) -> None:
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
def signed(byte: I32, skip: I32, bits: I32) -> I32:
    """`bits` bits of a byte, after the `skip` upper ones, sign-extended."""
    return np.uint8(np.int8(byte << skip) >> (8 - bits))


@inlined
def unpack(packet: Array, at: U64, width: U64, bits: I32, codes: Array) -> None:
    """The inverse of `pack` for 2, 3 and 6 bits: codes sign-extended to a byte."""
    w2, w3 = width + width, width + width + width
    if bits == 2:
        for j in range(width):
            byte = packet[at + j]
            codes[j], codes[width + j] = signed(byte, 6, 2), signed(byte, 4, 2)
            codes[w2 + j], codes[w3 + j] = signed(byte, 2, 2), signed(byte, 0, 2)
    else:
        for j in range(width):
            b0, b1, b2 = packet[at + j], packet[at + width + j], packet[at + w2 + j]
            b3 = (b0 >> 6) | (b1 >> 6) << 2 | (b2 >> 6) << 4
            if bits == 6:
                codes[j], codes[width + j] = signed(b0, 2, 6), signed(b1, 2, 6)
                codes[w2 + j], codes[w3 + j] = signed(b2, 2, 6), signed(b3, 2, 6)
            else:
                codes[j], codes[width + j] = signed(b0, 5, 3), signed(b0, 2, 3)
                codes[w2 + j], codes[w3 + j] = signed(b1, 5, 3), signed(b1, 2, 3)
                codes[w2 + w2 + j], codes[w2 + w3 + j] = signed(b2, 5, 3), signed(b2, 2, 3)
                codes[w3 + w3 + j], codes[w3 + w3 + width + j] = signed(b3, 5, 3), signed(b3, 2, 3)
