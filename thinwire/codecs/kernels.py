"""numba kernels for CPU: one pass over memory, the GIL released, results bit-equal to `reference`.

They work group by group in scratch that stays in the first-level cache. Three habits make them vectorise: a group's
maximum is an integer maximum over the floats' bits, adding 1.5 * 2^23 rounds a float to even and leaves the integer in its low
bits, and every inner loop runs over arrays sliced to start at 0. No fastmath: it would change roundings.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from thinwire.codecs.random import GAMMA, MIX32_A, MIX32_B, MIX64_A, MIX64_B
from thinwire.codecs.reference import BF16_MAX_BITS, TINY

ABS = np.int32(0x7FFFFFFF)
INF_BITS = np.int32(0x7F800000)
NAN_BITS = np.int32(0x7FC00000)
MAX_BITS = np.int32(BF16_MAX_BITS << 16 | 0xFFFF)
TINY_BITS = np.float32(TINY).view(np.int32)
MAGIC = np.float32(1.5 * 2**23)
MAGIC_BITS = MAGIC.view(np.int32)
NOISE_STEP = np.float32(2.0**-24)
A32, B32 = np.uint32(MIX32_A), np.uint32(MIX32_B)
A64, B64, GAMMA64 = np.uint64(MIX64_A), np.uint64(MIX64_B), np.uint64(GAMMA)
R13, R16, ONE32 = np.uint32(13), np.uint32(16), np.int32(1)
R27, R30, R31, R32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
LOW32 = np.uint64(0xFFFFFFFF)

kernel = njit(nogil=True, cache=True, error_model="numpy")
inlined = njit(nogil=True, cache=True, error_model="numpy", inline="always")


@kernel
def _mix64(z):
    z = (z ^ (z >> R30)) * A64
    z = (z ^ (z >> R27)) * B64
    return z ^ (z >> R31)


@kernel
def _key(seed, high):
    """derive_seed(seed, high)."""
    return _mix64((_mix64(GAMMA64 ^ seed) + GAMMA64) ^ high)


@kernel
def _peak_bits(x):
    """The bits of max|x| as an integer; above INF_BITS where x holds a NaN."""
    bits = x.view(np.int32)
    peak = np.int32(0)
    for j in range(bits.size):
        peak = max(peak, np.int32(bits[j] & ABS))
    return peak


@kernel
def _scale_bits(peak, shift):
    """What the wire stores for a group's maximum: 0 below TINY, NaN where not finite, else rounded up to 32 - shift bits."""
    if peak >= INF_BITS:
        return NAN_BITS >> shift
    if peak < TINY_BITS:
        return np.int32(0)
    upper = np.int64(peak) + (np.int64(1) << shift) - 1
    return np.int32(min(upper, np.int64(MAX_BITS) if shift else upper) >> shift)


@kernel
def _round(x, factor, levels, codes):
    low, high = np.int32(MAGIC_BITS - levels), np.int32(MAGIC_BITS + levels)
    for j in range(x.size):
        bits = np.float32(x[j] * factor + MAGIC).view(np.int32)
        codes[j] = np.uint8(min(max(bits, low), high))


@kernel
def _round_dithered(x, factor, levels, codes, seed, counter):
    low, high = np.int32(MAGIC_BITS - levels), np.int32(MAGIC_BITS + levels)
    above = counter >> R32
    key, next_key = _key(seed, above), _key(seed, (above + np.uint64(1)) & LOW32)
    first = np.uint32(counter)
    k0, k1 = np.uint32(key), np.uint32(key >> R32)
    n0, n1 = np.uint32(next_key), np.uint32(next_key >> R32)
    for j in range(x.size):
        position = np.uint32(first + np.uint32(j))
        wrapped = position < first
        h = np.uint32(position ^ (n0 if wrapped else k0))
        h = np.uint32((h ^ (h >> R16)) * A32)
        h = np.uint32((h ^ (h >> R13) ^ (n1 if wrapped else k1)) * B32)
        dither = np.float32((np.int32(h) >> np.int32(8)) | ONE32) * NOISE_STEP
        bits = np.float32(np.float32(x[j] * factor + dither) + MAGIC).view(np.int32)
        codes[j] = np.uint8(min(max(bits, low), high))
