"""What loops of numba are not compiled to: products modulo 2^32, a row in registers, lanes as the bits of a number.

LLVM's own instructions, on vectors that it cuts to those of any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.np.arrayobj import make_array

from thinwire.codecs.random import DITHER_BITS

LANES = np.uint64(32)
# The float to which an integer below 2^22 is added to be rounded, and lies in the lowest bits.
MAGIC = np.float32(1.5 * 2**23)
MAGIC_BITS = MAGIC.view(np.int32)
I1, I32 = ir.IntType(1), ir.IntType(32)
# Callers leave out the first argument, which type checkers are not told.
intrinsic: Any = extending.intrinsic
# What an intrinsic returns: its signature, and what writes its instructions.
Generated = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


def address_of(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: Any) -> Any:
    """The address of array[index : index + 32]."""
    data = make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), lanes.as_pointer())


@intrinsic
def product(typing: Any, a: Any, b: Any) -> Generated:
    """a b modulo 2^32 of two uint32, which `*` makes a uint64 of, in vectors of half as many lanes."""
    signature = types.uint32(types.uint32, types.uint32)
    return signature, lambda context, builder, signature, arguments: builder.mul(*arguments)


def _array_at(kind: Any) -> Any:
    """An intrinsic: the array of `kind` at an address, a uint64. Its indices are not checked, and it has no size."""

    def array_at(typing: Any, address: Any) -> Generated:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = make_array(kind)(context, builder)
            array.data = builder.inttoptr(arguments[0], array.data.type)
            return array._getvalue()

        return kind(types.uint64), generate

    return intrinsic(array_at)


bytes_at, shorts_at, words_at, floats_at = (
    _array_at(kind) for kind in (types.uint8[::1], types.int16[::1], types.int32[::1], types.float32[::1])
)


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
        fields = builder.load(address_of(context, builder, signature.args[0], x, at, lanes), align=4)
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

        row = builder.load(address_of(context, builder, signature.args[0], x, at, lanes), align=4)
        is_zero = builder.fcmp_ordered("==", row, ir.Constant(lanes, [0.0] * 32))
        for distance in (1, 2, 4, 8, 16):
            partner = chosen(row, row, [i ^ distance for i in range(32)])
            sums, differences = builder.fadd(row, partner), builder.fsub(partner, row)
            row = chosen(sums, differences, [i + 32 * bool(i & distance) for i in range(32)])
        first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scale, I32(0))
        row = builder.fmul(row, chosen(first, first, [0] * 32))
        builder.store(row, address_of(context, builder, signature.args[3], out, to, lanes), align=4)
        return builder.bitcast(is_zero, I32)

    return signature, generate


def _four_bits(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
    """See `round_4` and `dither_4`."""
    x, at, upper, factor, out, to, *dithers = arguments
    floats, lanes, codes = ir.VectorType(ir.FloatType(), 32), ir.VectorType(I32, 32), ir.VectorType(ir.IntType(8), 32)

    def all_of(value: Any) -> Any:
        first = builder.insert_element(ir.Constant(floats, ir.Undefined), value, I32(0))
        return builder.shuffle_vector(first, first, ir.Constant(lanes, [0] * 32))

    def number(value: int) -> Any:
        return ir.Constant(lanes, [value] * 32)

    def code_of(place: Any) -> Any:
        """Two's complement in 32 bytes; the sum with MAGIC holds the integer in its lowest bits."""
        values = builder.load(address_of(context, builder, signature.args[0], x, place, floats), align=4)
        scaled = builder.fmul(values, all_of(factor))
        fields = builder.bitcast(builder.fadd(scaled, ir.Constant(floats, [float(MAGIC)] * 32)), lanes)
        if dithers:
            drawn, first = dithers
            halves = ir.VectorType(ir.IntType(16), 32)
            own = builder.add(place, first)
            dither = builder.load(address_of(context, builder, signature.args[6], drawn, own, halves), align=2)
            fields = builder.ashr(builder.add(fields, builder.sext(dither, lanes)), number(DITHER_BITS))
            fields = builder.sub(fields, number(int(MAGIC_BITS) >> DITHER_BITS))
        else:
            fields = builder.sub(fields, number(int(MAGIC_BITS)))
        # By constants, LLVM sees that the codes fit into bytes, and packs them with fewer instructions.
        fields = builder.select(builder.icmp_signed("<", fields, number(-7)), number(-7), fields)
        fields = builder.select(builder.icmp_signed(">", fields, number(7)), number(7), fields)
        return builder.trunc(fields, codes)

    low = builder.and_(code_of(at), ir.Constant(codes, [15] * 32))
    high = builder.shl(code_of(upper), ir.Constant(codes, [4] * 32))
    builder.store(builder.or_(low, high), address_of(context, builder, signature.args[4], out, to, codes), align=1)


def _generate_four_bits(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    _four_bits(context, builder, signature, arguments)
    return context.get_dummy_value()


@intrinsic
def round_4(typing: Any, x: Any, at: Any, upper: Any, factor: Any, out: Any, to: Any) -> Generated:
    """out[to : to + 32] = clamp(round(x factor), -7, 7) of x[at : at + 32], and of x[upper : upper + 32] in the upper
    halves of the bytes."""
    return types.void(x, types.uint64, types.uint64, types.float32, out, types.uint64), _generate_four_bits


@intrinsic
def dither_4(
    typing: Any, x: Any, at: Any, upper: Any, factor: Any, out: Any, to: Any, dithers: Any, first: Any
) -> Generated:
    """As `round_4`, clamp(floor((round(x factor) + dither) / 2^15), -7, 7); that of x[i] is dithers[first + i]."""
    signature = types.void(x, types.uint64, types.uint64, types.float32, out, types.uint64, dithers, types.uint64)
    return signature, _generate_four_bits
