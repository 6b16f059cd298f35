"""Cosine transforms of blocks, within rounding of their plain version: along one side, then along the other.

A transform is a list of turns: each replaces two rows by two mixtures of them, and so works on whole rows at once.
Numbers are added in one order on every machine.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from thinwire.codecs.cosines import HOWS
from thinwire.codecs.kernels.common import F32, ONE, OPTIONS, THREE, U64, ZERO, Array, kernel
from thinwire.codecs.kernels.vectors import LANES, lowest_bit, reaching

# A product and a sum in one instruction.
inlined_fused = njit(**OPTIONS, forceinline=True, fastmath={"contract"})
TWO, LOWEST, ANY = np.uint64(2), np.uint32(1), np.int32(1)
SUBTRACT, SIGN = np.uint64(HOWS["subtract"]), np.uint64(HOWS["sign"])


@inlined_fused
def _turn(x: Array, p: U64, q: U64, a: F32, b: F32, c: F32, d: F32, width: U64) -> None:
    for j in range(width):
        u, v = x[p + j], x[q + j]
        x[p + j], x[q + j] = a * u + b * v, c * u + d * v


@inlined_fused
def _turn_all(x: Array, width: U64, pairs: Array, factors: Array) -> None:
    """x [rows, width] after all turns; see `thinwire.codecs.cosines.Turns`."""
    for turn in range(np.uint64(pairs.size) >> ONE):
        at, here = turn + turn, turn * np.uint64(4)
        _turn(
            x, pairs[at] * width, pairs[at + ONE] * width, factors[here], factors[here + ONE], factors[here + TWO],
            factors[here + THREE], width,
        )  # fmt: skip


@kernel
def forward(
    x: Array, out: Array, width: U64, pairs: Array, factors: Array, places: Array, other_pairs: Array,
    other_factors: Array, other_places: Array, work: Array,
) -> None:  # fmt: skip
    """out = the coefficients of each block of x, [blocks, columns, rows].

    x: flat fp32, rows of `width`, in blocks of rows x columns. pairs, factors, places: of the rows' Turns; other_: of
    the columns'. work: fp32, two blocks.
    """
    rows, columns = np.uint64(places.size), np.uint64(other_places.size)
    size, at = rows * columns, ZERO
    block, turned = work[:size], work[size:]
    for top in range(np.uint64(x.size) // (rows * width)):
        for across in range(width // columns):
            start = top * rows * width + across * columns
            for i in range(rows):
                for j in range(columns):
                    block[i * columns + j] = x[start + i * width + j]
            _turn_all(block, columns, pairs, factors)
            for i in range(rows):
                here = places[i] * columns
                for j in range(columns):
                    turned[j * rows + i] = block[here + j]
            _turn_all(turned, rows, other_pairs, other_factors)
            for j in range(columns):
                here = other_places[j] * rows
                for i in range(rows):
                    out[at + i] = turned[here + i]
                at += rows


@inlined_fused
def _add(x: F32, right: Array, at: U64, y: Array, to: U64, width: U64) -> None:
    for j in range(width):
        y[to + j] += x * right[at + j]


@inlined_fused
def _scatter(blocks: Array, at: U64, right: Array, places: Array, columns: U64, half: Array) -> None:
    """half [rows, columns] = the block at `at` with its columns transformed back; row r is in row places[r]."""
    rows = np.uint64(places.size)
    size = rows * columns
    for j in range(size):
        half[j] = np.float32(0)
    whole = size - size % LANES
    for start in range(ZERO, whole, LANES):
        bits = reaching(blocks, at + start, ANY)
        while bits:
            place = np.uint32(start + np.uint64(lowest_bit(bits)))
            bits = np.uint32(bits & np.uint32(bits - LOWEST))
            column = np.uint64(place // np.uint32(rows))
            row = np.uint64(place) - column * rows
            _add(blocks[at + place], right, column * columns, half, places[row] * columns, columns)
    for rest in range(whole, size):
        _add(blocks[at + rest], right, rest // rows * columns, half, places[rest % rows] * columns, columns)


@kernel
def backward(
    blocks: Array, out: Array, width: U64, pairs: Array, factors: Array, places: Array, right: Array, columns: U64,
    how: U64, half: Array,
) -> None:  # fmt: skip
    """out = the blocks with these coefficients, or their signs, or out -= the blocks; see `codecs.cosines.HOWS`.

    pairs, factors, places: of the turns that take the rows back. right: the flat matrix of the columns. half: fp32,
    one block. The sign of NaN is NaN.
    """
    rows, at = np.uint64(places.size), ZERO
    for top in range(np.uint64(out.size) // (rows * width)):
        for across in range(width // columns):
            _scatter(blocks, at, right, places, columns, half)
            _turn_all(half, columns, pairs, factors)
            at += rows * columns
            start = top * rows * width + across * columns
            for i in range(rows):
                here, there = i * columns, start + i * width
                if how == SUBTRACT:
                    for j in range(columns):
                        out[there + j] -= half[here + j]
                elif how == SIGN:
                    for j in range(columns):
                        value = half[here + j]
                        out[there + j] = np.float32(1) if value > 0 else (np.float32(-1) if value < 0 else value)
                else:
                    for j in range(columns):
                        out[there + j] = half[here + j]
