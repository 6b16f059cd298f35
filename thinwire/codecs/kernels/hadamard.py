"""Rotations, bit-equal to `reference.hadamard`: rows of 32 in registers, others in loops."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import C32, F32, ONE, U64, ZERO, Array, inlined, kernel
from thinwire.codecs.kernels.vectors import rotate_32

ALL_ZERO = np.uint32(0xFFFFFFFF)


@inlined
def _rotate_row(x: Array, at: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> bool:
    """One row of any power of two; see `rotate`. work: two rows."""
    half, here, there = block >> ONE, ZERO, block
    zeros = ZERO
    for j in range(block):
        work[j] = x[at + j]
        zeros += np.uint64(x[at + j] == np.float32(0))
    width = ONE
    while width < block:
        for j in range(half):
            even, odd = work[here + j + j], work[here + j + j + ONE]
            work[there + j], work[there + half + j] = even + odd, even - odd
        here, there, width = there, here, width + width
    for j in range(block):
        out[to + j] = work[here + j] * scale
    return bool((zeros > ZERO) & (zeros < block))


@inlined
def row_scale(block: U64) -> F32:
    """1 / sqrt(block)."""
    return np.float32(1 / np.sqrt(np.float64(block)))


@inlined
def rotate(x: Array, num: U64, at: U64, size: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> bool:
    """`size` elements (whole rows) of x, zero from element `num` on, rotated to `out`; work: 3 rows.

    Returns whether one of the rows held both zeros and other values, as `reference.holds_zeros`.
    """
    holds_zeros = False
    for row in range(size // block):
        done = row * block
        source, start = x, at + done
        if start + block > num:
            source, start = work, block + block
            for j in range(block):
                place = at + done + j
                work[start + j] = x[place] if place < num else np.float32(0)
        if block == C32:
            zeros = rotate_32(source, start, scale, out, to + done)
            holds_zeros = holds_zeros or bool((zeros != np.uint32(0)) & (zeros != ALL_ZERO))
        else:
            mixed = _rotate_row(source, start, block, scale, work, out, to + done)
            holds_zeros = holds_zeros or mixed
    return holds_zeros


@kernel
def rotate_inplace(x: Array, block: U64, work: Array) -> None:
    """x <- H x for whole rows; `work`: 3 rows."""
    num = np.uint64(x.size)
    rotate(x, num, ZERO, num, np.uint64(block), row_scale(block), work, x, ZERO)
