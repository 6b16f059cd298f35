"""Rotations, bit-equal to `reference.hadamard`: rows of 32 in the vectors of the processor, others in loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from thinwire.codecs.kernels.common import C32, F32, ONE, U64, ZERO, Array, inlined, kernel

ALL_ZERO = np.uint32(0xFFFFFFFF)


@intrinsic
def _rotate_32(typing: Any, x: Any, at: Any, scale: Any, out: Any, to: Any) -> Any:
    """x[at : at + 32] times H and the scale -> out[to : to + 32]; bit i of the result: x[at + i] is zero.

    Stage d = 1, 2, 4, 8, 16 takes a, b that lie d apart to a + b and a - b in their places. These are the additions of
    `reference.hadamard` in its order, which moves them to other places. As one LLVM vector a row stays in registers;
    LLVM does not find that in a loop.
    """
    width = 32
    signature = types.uint32(x, types.uint64, types.float32, out, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at, scale, out, to = arguments
        lanes = ir.VectorType(ir.FloatType(), width)

        def place(array: Any, kind: Any, index: Any) -> Any:
            data = make_array(kind)(context, builder, array).data
            return builder.bitcast(builder.gep(data, [index]), lanes.as_pointer())

        def chosen(first: Any, second: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), width), order))

        row = builder.load(place(x, signature.args[0], at), align=4)
        is_zero = builder.fcmp_ordered("==", row, ir.Constant(lanes, [0.0] * width))
        for distance in (1, 2, 4, 8, 16):
            partner = chosen(row, row, [i ^ distance for i in range(width)])
            sums, differences = builder.fadd(row, partner), builder.fsub(partner, row)
            row = chosen(sums, differences, [i + width * bool(i & distance) for i in range(width)])
        first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scale, ir.Constant(ir.IntType(32), 0))
        row = builder.fmul(row, chosen(first, first, [0] * width))
        builder.store(row, place(out, signature.args[3], to), align=4)
        return builder.bitcast(is_zero, ir.IntType(width))

    return signature, generate


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
def rotate(x: Array, at: U64, size: U64, block: U64, scale: F32, work: Array, out: Array, to: U64) -> bool:
    """`size` elements (whole rows) of x, zero beyond its end, rotated to `out`; work: 3 rows.

    Returns whether one of the rows held both zeros and other values, as `reference.holds_zeros`.
    """
    holds_zeros = False
    for row in range(size // block):
        done = row * block
        source, start = x, at + done
        if start + block > np.uint64(x.size):
            source, start = work, block + block
            for j in range(block):
                place = at + done + j
                work[start + j] = x[place] if place < np.uint64(x.size) else np.float32(0)
        if block == C32:
            zeros = _rotate_32(source, start, scale, out, to + done)
            holds_zeros = holds_zeros or bool((zeros != np.uint32(0)) & (zeros != ALL_ZERO))
        else:
            mixed = _rotate_row(source, start, block, scale, work, out, to + done)
            holds_zeros = holds_zeros or mixed
    return holds_zeros


@kernel
def rotate_inplace(x: Array, block: U64, work: Array) -> None:
    """x <- H x for whole rows; `work`: 3 rows."""
    rotate(x, ZERO, np.uint64(x.size), np.uint64(block), row_scale(block), work, x, ZERO)
