"""The sketches, bit-equal to their plain versions."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import F32, FOUR, ONE, THREE, U64, ZERO, Array, fill_draws, inlined, kernel

TWO = np.uint64(2)
BUCKET_SHIFT, LOWEST = np.uint64(22), np.int32(1)


@inlined
def _signed(value: F32, draw: U64) -> F32:
    """`value` times -1 where the lowest bit of `draw` is set; a product, since that leaves a NaN's sign alone."""
    return value * np.float32(np.int32(1) - np.int32((draw & LOWEST) << LOWEST))


@inlined
def _find_places(draws: Array, size: U64, buckets: U64, places: Array) -> None:
    for j in range(size):
        places[j] = np.int32((np.uint64(np.uint32(draws[j] >> LOWEST)) * buckets) >> BUCKET_SHIFT)


@kernel
def count(
    x: Array,
    sums: Array,
    group: U64,
    ratio: U64,
    seed: U64,
    counter: U64,
    draws: Array,
    places: Array,
    values: Array,
) -> None:
    """sums = the count sketch of flat fp32 x. Scratch, one group: draws, places, int32; values, fp32.

    Only the additions can't be done side by side, as two may have one place.
    """
    num, group, ratio, start, first = np.uint64(x.size), np.uint64(group), np.uint64(ratio), ZERO, ZERO
    while start < num:
        size = min(group, num - start)
        buckets = (size + ratio - ONE) // ratio
        fill_draws(draws, size, seed, counter + start)
        for k in range(buckets):
            sums[first + k] = np.float32(0)
        _find_places(draws, size, buckets, places)
        for j in range(size):
            values[j] = _signed(x[start + j], draws[j])
        for j in range(size):
            sums[first + np.uint64(places[j])] += values[j]
        start, first = start + size, first + buckets


@kernel
def uncount(
    sums: Array,
    out: Array,
    group: U64,
    ratio: U64,
    shrink: F32,
    tail_shrink: F32,
    add: bool,
    seed: U64,
    counter: U64,
    draws: Array,
    places: Array,
    values: Array,
) -> None:
    """out = the estimate from the sums, or out += it. Scratch as of `count`."""
    num, group, ratio, start, first = np.uint64(out.size), np.uint64(group), np.uint64(ratio), ZERO, ZERO
    while start < num:
        size = min(group, num - start)
        buckets = (size + ratio - ONE) // ratio
        factor = shrink if size == group else tail_shrink
        fill_draws(draws, size, seed, counter + start)
        _find_places(draws, size, buckets, places)
        for j in range(size):
            values[j] = sums[first + np.uint64(places[j])]
        if add:
            for j in range(size):
                out[start + j] += np.float32(_signed(values[j], draws[j]) * factor)
        else:
            for j in range(size):
                out[start + j] = np.float32(_signed(values[j], draws[j]) * factor)
        start, first = start + size, first + buckets


@kernel
def multiply(rows: Array, matrix: Array, out: Array, scale: F32, add: bool, total: Array) -> None:
    """out = (rows @ matrix[:n, :b]) * scale, or out += that: [r, n], [>= n, >= b] -> [r, b]; total: fp32 scratch [b].

    Each sum takes its terms in their order, four to a pass.
    """
    num_rows, inner, width = np.uint64(rows.shape[0]), np.uint64(rows.shape[1]), np.uint64(out.shape[1])
    whole = inner - inner % FOUR
    for r in range(num_rows):
        for k in range(width):
            total[k] = np.float32(0)
        for j in range(ZERO, whole, FOUR):
            j1, j2, j3 = j + ONE, j + TWO, j + THREE
            v0, v1, v2, v3 = rows[r, j], rows[r, j1], rows[r, j2], rows[r, j3]
            for k in range(width):
                sum01 = np.float32(np.float32(total[k] + v0 * matrix[j, k]) + v1 * matrix[j1, k])
                total[k] = np.float32(sum01 + v2 * matrix[j2, k]) + v3 * matrix[j3, k]
        for j in range(whole, inner):
            for k in range(width):
                total[k] += rows[r, j] * matrix[j, k]
        for k in range(width):
            value = np.float32(total[k] * scale)
            out[r, k] = out[r, k] + value if add else value
