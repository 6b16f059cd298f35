"""What loops of numba are not compiled to: products modulo 2^32, a row in registers, lanes as the bits of a number.

LLVM's own instructions, on vectors that it cuts to those of any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

LANES = np.uint64(32)
I1, I32 = ir.IntType(1), ir.IntType(32)
# What an intrinsic returns: its signature, and what writes its instructions.
Generated = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: Any) -> Any:
    """The address of array[index : index + 32]."""
    data = make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), lanes.as_pointer())


@intrinsic
def product(typing: Any, a: Any, b: Any) -> Generated:
    """a b modulo 2^32 of two uint32, which `*` makes a uint64 of, in vectors of half as many lanes."""
    signature = types.uint32(types.uint32, types.uint32)
    return signature, lambda context, builder, signature, arguments: builder.mul(*arguments)


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Generated:
    """The number of the lowest bit that is set in a uint32 above 0."""
    signature = types.uint32(types.uint32)
    return signature, lambda context, builder, signature, arguments: builder.cttz(arguments[0], I1(1))


@intrinsic
def reaching(typing: Any, x: Any, at: Any, bound: Any) -> Generated:
    """Bit i of the uint32: the bits of |x[at + i]|, fp32, as an integer are at least `bound`; i = 0 .. 31."""
    signature = types.uint32(x, types.uint64, types.int32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at, bound = arguments
        lanes = ir.VectorType(I32, 32)
        fields = builder.load(_place(context, builder, signature.args[0], x, at, lanes), align=4)
        keys = builder.and_(fields, ir.Constant(lanes, [0x7FFFFFFF] * 32))
        first = builder.insert_element(ir.Constant(lanes, ir.Undefined), bound, I32(0))
        bounds = builder.shuffle_vector(first, first, ir.Constant(lanes, [0] * 32))
        return builder.bitcast(builder.icmp_signed(">=", keys, bounds), I32)

    return signature, generate


@intrinsic
def rotate_32(typing: Any, x: Any, at: Any, scale: Any, out: Any, to: Any) -> Generated:
    """x[at : at + 32] times H and the scale -> out[to : to + 32]; bit i of the uint32: x[at + i] is zero.

    Stage d = 1, 2, 4, 8, 16 takes a, b that lie d apart to a + b and a - b in their places. These are the additions of
    `reference.hadamard` in its order, which moves them to other places.
    """
    signature = types.uint32(x, types.uint64, types.float32, out, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, at, scale, out, to = arguments
        lanes = ir.VectorType(ir.FloatType(), 32)

        def chosen(first: Any, second: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 32), order))

        row = builder.load(_place(context, builder, signature.args[0], x, at, lanes), align=4)
        is_zero = builder.fcmp_ordered("==", row, ir.Constant(lanes, [0.0] * 32))
        for distance in (1, 2, 4, 8, 16):
            partner = chosen(row, row, [i ^ distance for i in range(32)])
            sums, differences = builder.fadd(row, partner), builder.fsub(partner, row)
            row = chosen(sums, differences, [i + 32 * bool(i & distance) for i in range(32)])
        first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scale, I32(0))
        row = builder.fmul(row, chosen(first, first, [0] * 32))
        builder.store(row, _place(context, builder, signature.args[3], out, to, lanes), align=4)
        return builder.bitcast(is_zero, I32)

    return signature, generate
