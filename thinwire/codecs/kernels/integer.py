"""Integers, rotated or not, bit-equal to `reference`."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import (
    ABS,
    DITHER_SHIFT,
    F32,
    FOUR,
    I32,
    INF_BITS,
    LANE_BYTES,
    LANE_SHIFT,
    ONE,
    U64,
    ZERO,
    Array,
    fill_dithers,
    inlined,
    kernel,
    pack,
    peak_bits,
    scale_bits,
    signed,
    unpack,
)
from thinwire.codecs.kernels.hadamard import rotate, row_scale
from thinwire.codecs.kernels.vectors import (
    LANES,
    MAGIC,
    MAGIC_BITS,
    bytes_at,
    dither_4,
    floats_at,
    round_4,
    shorts_at,
    words_at,
)
from thinwire.codecs.layout import Groups, Rounding

# The sign bit of a scale.
MARK = np.int32(-(1 << 31))
# What code 0 is before the offset of MAGIC is taken off.
DITHERED_ZERO = np.int32(MAGIC_BITS >> DITHER_SHIFT)


@inlined
def _round(x: Array, start: U64, size: U64, factor: F32, levels: I32, codes: Array, at: U64) -> None:
    """codes = clamp(round(x * factor), -levels, levels) in two's complement."""
    low, high = np.int32(MAGIC_BITS - levels), np.int32(MAGIC_BITS + levels)
    for j in range(size):
        bits = np.float32(x[start + j] * factor + MAGIC).view(np.int32)
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
    dithers: Array,
    first: U64,
) -> None:
    """codes = clamp(floor(round(x * factor) + dithers) / 2^15, -levels, levels) in two's complement, as `_round`."""
    low, high = np.int32(DITHERED_ZERO - levels), np.int32(DITHERED_ZERO + levels)
    for j in range(size):
        bits = np.float32(x[start + j] * factor + MAGIC).view(np.int32)
        level = np.int32(bits + np.int32(dithers[first + j])) >> DITHER_SHIFT
        codes[at + j] = np.uint8(min(max(level, low), high) - DITHERED_ZERO)


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
    is_stochastic: bool,
    dithers: Array,
    first: U64,
) -> None:
    """One group's codes, with the scale that the wire stores, to out[at:]; its dithers are at dithers[first:]."""
    bits, shift = groups.bits, groups.shift
    if stored == 0 or stored >= INF_BITS >> shift:
        for j in range(width * np.uint64(LANE_BYTES[bits])):
            out[at + j] = np.uint8(0)
        return
    levels = np.int32((1 << (bits - 1)) - 1)
    scale = np.int32(stored << shift).view(np.float32)
    factor = np.float32(levels) / scale
    if is_stochastic:
        factor = np.float32(levels << DITHER_SHIFT) / scale
        if bits == 4 and size == width + width and width % LANES == ZERO:
            for j in range(ZERO, width, LANES):
                dither_4(x, start + j, start + width + j, factor, out, at + j, dithers, first - start)
            return
        if bits == 8:
            _round_dithered(x, start, size, factor, levels, out, at, dithers, first)
        else:
            _round_dithered(x, start, size, factor, levels, codes, ZERO, dithers, first)
    elif bits == 4 and size == width + width and width % LANES == ZERO:
        for j in range(ZERO, width, LANES):
            round_4(x, start + j, start + width + j, factor, out, at + j)
        return
    elif bits == 8:
        _round(x, start, size, factor, levels, out, at)
    else:
        _round(x, start, size, factor, levels, codes, ZERO)
    if bits != 8:
        for j in range(size, width << np.uint64(LANE_SHIFT[bits])):
            codes[j] = np.uint8(0)
        pack(codes, width, bits, out, at)


@inlined
def _encode_one(
    x: Array,
    length: U64,
    packet: U64,
    codes_at: U64,
    groups: Groups,
    block: U64,
    rounding: Rounding,
    counters: Array,
    number: U64,
    rows: Array,
    work: Array,
    codes: Array,
    words: Array,
    dithers: Array,
) -> U64:
    """`length` elements of x, with zeros beyond up to a whole row, to the packet at an address; see `encode`.

    Returns the number of bytes written.
    """
    bits, group, at = groups.bits, np.uint64(groups.size), codes_at
    out, num = bytes_at(packet), length
    if block:
        num = (num + block - ONE) // block * block
    block_scale = row_scale(block)
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    drawn, origin, room, piece = ZERO, ZERO, group, num // max(np.uint64(counters.shape[1]), ONE)
    if rounding.is_stochastic:
        room = max(group, (np.uint64(dithers.size) - FOUR) // group * group)
    for index in range((num + group - ONE) // group):
        start = index * group
        size = min(group, num - start)
        width = (size + (ONE << lane_shift) - ONE) >> lane_shift
        if rounding.is_stochastic and start + size > drawn:
            # For many groups at once, as far as the scratch goes.
            at_piece = start // piece
            first_of, end_of = at_piece * piece, (at_piece + ONE) * piece
            drawn, counter = min(start + room, min(end_of, num)), counters[number, at_piece] + (start - first_of)
            fill_dithers(words, drawn - start, rounding.seed, counter)
            origin = start - (counter & ONE)
        first = start - origin
        mark = np.int32(0)
        if block:
            if rotate(x, length, start, size, block, block_scale, work, rows, ZERO):
                for j in range(size):
                    rows[j] = x[start + j] if start + j < length else np.float32(0)
                mark = MARK >> groups.shift
            stored = scale_bits(peak_bits(rows, ZERO, size), groups.shift)
            _encode_group(
                rows, ZERO, size, width, stored, groups, out, at, codes, rounding.is_stochastic, dithers, first
            )
            if stored == 0 or stored >= INF_BITS >> groups.shift:
                mark = np.int32(0)
        else:
            stored = scale_bits(peak_bits(x, start, size), groups.shift)
            _encode_group(x, start, size, width, stored, groups, out, at, codes, rounding.is_stochastic, dithers, first)
        if groups.shift:
            shorts_at(packet)[index] = stored | mark
        else:
            words_at(packet)[index] = stored | mark
        at += width * lane_bytes
    return at


@kernel
def encode(
    tensors: Array,
    length: U64,
    packets: Array,
    codes_at: U64,
    num_bytes: U64,
    groups: Groups,
    block: U64,
    rounding: Rounding,
    counters: Array,
    rows: Array,
    work: Array,
    codes: Array,
    words: Array,
    dithers: Array,
) -> None:
    """Flat fp32 tensors of `length` elements -> a packet each: scales (int32 or int16 bits), codes, zeros at the end.

    A group in which the rotation would blur zeros is left as it is, and the sign bit of its scale is set.

    tensors, packets: uint64, where each lies. counters: uint64 [tensors, pieces], the number of the first element of
    each of a tensor's equal pieces. codes_at: where codes follow the scales. num_bytes: of a packet. block: elements of
    a Hadamard row, 0 for none. Scratch: rows, fp32, one group; work, fp32, 3 Hadamard rows; codes, uint8, one group;
    words, uint32, half a group or more and one at each end; dithers, int16: the same memory between.
    """
    length, codes_at, block = np.uint64(length), np.uint64(codes_at), np.uint64(block)
    for number in range(np.uint64(packets.size)):
        packet = packets[number]
        end = _encode_one(
            floats_at(tensors[number]), length, packet, codes_at, groups, block, rounding, counters, number, rows,
            work, codes, words, dithers,
        )  # fmt: skip
        for j in range(end, np.uint64(num_bytes)):
            bytes_at(packet)[j] = np.uint8(0)


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


@inlined
def _step(address: U64, index: U64, groups: Groups, levels: F32) -> F32:
    """s / M of a group, by what a packet stores of its scale, whatever the sign."""
    stored = np.int32(shorts_at(address)[index]) << groups.shift if groups.shift else words_at(address)[index]
    return np.int32(np.int32(stored) & ABS).view(np.float32) / levels


@kernel
def decode(packets: Array, codes_at: U64, outs: Array, length: U64, groups: Groups, add: bool, codes: Array) -> None:
    """Packets -> each tensor = the sum of the values of its packets in their order, or tensor += each of them.

    packets: uint64 [tensors, n], where each lies. outs: uint64 [tensors], where fp32 tensors of `length` elements lie.
    codes_at: where codes follow the scales. codes: uint8, one group. A group of a sum stays in the first cache until
    all packets are in it.
    """
    bits, num, group = groups.bits, np.uint64(length), np.uint64(groups.size)
    lane_shift, lane_bytes = np.uint64(LANE_SHIFT[bits]), np.uint64(LANE_BYTES[bits])
    levels = np.float32((1 << (bits - 1)) - 1)
    for row in range(np.uint64(outs.size)):
        out, at = floats_at(outs[row]), np.uint64(codes_at)
        for index in range((num + group - ONE) // group):
            start = index * group
            size = min(group, num - start)
            width = (size + (ONE << lane_shift) - ONE) >> lane_shift
            for number in range(np.uint64(packets.shape[1])):
                address = packets[row, number]
                packet, adds = bytes_at(address), add or number > ZERO
                step = _step(address, index, groups, levels)
                if bits == 8:
                    _write(packet, at, size, step, adds, out, start)
                elif bits == 4:
                    _write_4(packet, at, size, width, step, adds, out, start)
                else:
                    unpack(packet, at, width, bits, codes)
                    _write(codes, ZERO, size, step, adds, out, start)
            at += width * lane_bytes


@kernel
def is_any_marked(packets: Array, num_scales: U64, shift: I32) -> bool:
    """Whether any of the packets, uint64 where each lies, has a scale with its sign bit set."""
    seen = np.int32(0)
    for number in range(np.uint64(packets.size)):
        for index in range(np.uint64(num_scales)):
            if shift:
                seen |= np.int32(shorts_at(packets[number])[index])
            else:
                seen |= words_at(packets[number])[index]
    return bool(seen < 0)
