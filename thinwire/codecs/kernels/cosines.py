"""Cosine transforms of blocks, within rounding of their plain version: along one side, then along the other.

Folding halves the work each time: of the sums x_i + x_(n-1-i) come the even frequencies, as a transform of half the
length, and of the differences the odd ones, as a product with half of the matrix. Numbers are added in one order on
every machine.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from thinwire.codecs.kernels.common import F32, FOUR, ONE, OPTIONS, THREE, U64, ZERO, Array, kernel
from thinwire.codecs.kernels.vectors import LANES, lowest_bit, reaching

# A product and a sum in one instruction.
inlined_fused = njit(**OPTIONS, forceinline=True, fastmath={"contract"})
LOWEST, ANY, TWO = np.uint32(1), np.int32(1), np.uint64(2)


@inlined_fused
def _add_four(x: Array, p: U64, q: U64, r: U64, s: U64, a: F32, b: F32, c: F32, d: F32, y: Array, width: U64) -> None:
    for j in range(width):
        y[j] += a * x[p + j] + b * x[q + j] + c * x[r + j] + d * x[s + j]


@inlined_fused
def _add_one(x: Array, p: U64, a: F32, y: Array, width: U64) -> None:
    for j in range(width):
        y[j] += a * x[p + j]


@inlined_fused
def _mix(x: Array, first: U64, factors: Array, at: U64, listed: Array, num: U64, y: Array, width: U64) -> None:
    """y[:width] = the sum over the `num` listed k of factors[at + k] times row first + k of x."""
    for j in range(width):
        y[j] = np.float32(0)
    done = ZERO
    while done + FOUR <= num:
        k, m, n, o = listed[done], listed[done + ONE], listed[done + TWO], listed[done + THREE]
        _add_four(
            x, (first + k) * width, (first + m) * width, (first + n) * width, (first + o) * width,
            factors[at + k], factors[at + m], factors[at + n], factors[at + o], y, width,
        )  # fmt: skip
        done += FOUR
    while done < num:
        k = listed[done]
        _add_one(x, (first + k) * width, factors[at + k], y, width)
        done += ONE


@inlined_fused
def _forward(x: Array, other: Array, size: U64, width: U64, matrix: Array, order: Array, out: Array, to: U64) -> None:
    """out[to:] = matrix @ x, x [size, width], by folding; x and `other` are overwritten. order: 0, 1, 2, ..."""
    num, step = size, ONE
    while not num & ONE:
        num = num >> ONE
        for i in range(num):
            here, there = i * width, (num + num - ONE - i) * width
            for j in range(width):
                a, b = x[here + j], x[there + j]
                other[here + j], other[num * width + here + j] = a + b, a - b
        f = step
        while f < size:
            _mix(other, num, matrix, f * size, order, num, out[to + f * width :], width)
            f += step + step
        x, other, step = other, x, step + step
    for m in range(num):
        f = m * step
        _mix(x, ZERO, matrix, f * size, order, num, out[to + f * width :], width)


@kernel
def forward(
    x: Array, out: Array, rows: U64, columns: U64, width: U64, left: Array, right: Array, order: Array, work: Array
) -> None:
    """out = the coefficients of each block of x, [blocks, columns, rows].

    x: flat fp32, rows of `width`, in blocks of rows x columns. left, right: the flat matrices of both sides. order: 0,
    1, 2, ... up to the longer side. work: fp32, three blocks.
    """
    size, at = rows * columns, ZERO
    block, other, half = work[:size], work[size : size + size], work[size + size :]
    for top in range(np.uint64(x.size) // (rows * width)):
        for across in range(width // columns):
            start = top * rows * width + across * columns
            for i in range(rows):
                for j in range(columns):
                    block[i * columns + j] = x[start + i * width + j]
            _forward(block, other, rows, columns, left, order, half, ZERO)
            for i in range(rows):
                for j in range(columns):
                    block[j * rows + i] = half[i * columns + j]
            _forward(block, other, columns, rows, right, order, out, at)
            at += size


@inlined_fused
def _scatter(blocks: Array, at: U64, rows: U64, columns: U64, right: Array, half: Array, used: Array) -> None:
    """half [rows, columns] = the block at `at` with its columns transformed back; used[r]: whether row r is not 0."""
    size = rows * columns
    for j in range(size):
        half[j] = np.float32(0)
    for r in range(rows):
        used[r] = ZERO
    whole = size - size % LANES
    for start in range(ZERO, whole, LANES):
        bits = reaching(blocks, at + start, ANY)
        while bits:
            place = np.uint32(start + np.uint64(lowest_bit(bits)))
            bits = np.uint32(bits & np.uint32(bits - LOWEST))
            column = np.uint64(place // np.uint32(rows))
            row = np.uint64(place) - column * rows
            used[row] = ONE
            _add_one(right, column * columns, blocks[at + place], half[row * columns :], columns)
    for rest in range(whole, size):
        row = rest % rows
        used[row] = ONE
        _add_one(right, rest // rows * columns, blocks[at + rest], half[row * columns :], columns)


@inlined_fused
def _backward(
    half: Array, used: Array, rows: U64, width: U64, turned: Array, listed: Array, y: Array, q: Array
) -> None:
    """y = the transpose of a side's matrix @ half [rows, width]. turned: that transpose, flat."""
    num, step = rows, ONE
    while not num & ONE:
        num, step = num >> ONE, step + step
    count = ZERO
    for m in range(num):
        listed[count] = m * step
        count += used[m * step]
    for i in range(num):
        _mix(half, ZERO, turned, i * rows, listed, count, y[i * width :], width)
    while step > ONE:
        step, count = step >> ONE, ZERO
        f = step
        while f < rows:
            listed[count] = f
            count += used[f]
            f += step + step
        for i in range(num):
            _mix(half, ZERO, turned, i * rows, listed, count, q, width)
            here, there = i * width, (num + num - ONE - i) * width
            for j in range(width):
                p = y[here + j]
                y[here + j], y[there + j] = p + q[j], p - q[j]
        num += num


@kernel
def backward(
    blocks: Array, out: Array, rows: U64, columns: U64, width: U64, turned: Array, right: Array, subtract: bool,
    used: Array, listed: Array, work: Array,
) -> None:  # fmt: skip
    """out = the blocks with these coefficients, or out -= them.

    The arguments are those of `forward`. turned: the transposed matrix of the rows. used, listed: uint64 [rows + 1].
    """
    size, at = rows * columns, ZERO
    half, y, q = work[:size], work[size : size + size], work[size + size :]
    for top in range(np.uint64(out.size) // (rows * width)):
        for across in range(width // columns):
            _scatter(blocks, at, rows, columns, right, half, used)
            _backward(half, used, rows, columns, turned, listed, y, q)
            at += size
            start = top * rows * width + across * columns
            for i in range(rows):
                here = start + i * width
                for j in range(columns):
                    value = y[i * columns + j]
                    out[here + j] = out[here + j] - value if subtract else value
