"""TopK, Threshold and RandomK, bit-equal to their plain versions."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.indices import MAX_ADAPTATIONS, MAX_KEY
from thinwire.codecs.kernels.common import (
    ABS,
    I32,
    INF_BITS,
    NAN_BITS,
    ONE,
    U64,
    ZERO,
    Array,
    fill_draws,
    inlined,
    kernel,
    peak_bits,
)
from thinwire.codecs.kernels.vectors import LANES, lowest_bit, reaching

LAST_KEY, LARGEST_FINITE = np.int32(0x7FFFFFFF), np.int32(MAX_KEY)
SAMPLE_STRIDE, MARGIN = np.uint64(16), np.uint64(4)
NAN = NAN_BITS.view(np.float32)
DRAW_BITS = np.uint64(23)
THREE, SEVEN, EIGHT = np.uint64(3), np.uint64(7), np.uint64(8)
SHRINK = np.float32(0.8)
# Between the keys of a float and of a sixteenth of it.
SIXTEENTH = np.int32(4 << 23)
TWO, LOWEST = np.uint64(2), np.uint32(1)


@inlined
def _num_reaching(keys: Array, size: U64, bound: I32) -> U64:
    count = np.int32(0)
    for j in range(size):
        count += np.int32(keys[j] >= bound)
    return np.uint64(count)


@inlined
def _num_equal(keys: Array, size: U64, key: I32) -> I32:
    count = np.int32(0)
    for j in range(size):
        count += np.int32(keys[j] == key)
    return count


@inlined
def _kth_largest(keys: Array, size: U64, k: U64, low: I32) -> I32:
    """The k-th largest of keys[:size], of which at least k reach `low`: bisection, in passes that stay in cache."""
    peak = low
    for j in range(size):
        peak = max(peak, keys[j])
    floor, ceiling = np.int64(low), np.int64(peak) + 1
    while ceiling - floor > 1:
        middle = (floor + ceiling) >> 1
        count = _num_reaching(keys, size, np.int32(middle))
        if count >= k:
            floor = middle
            if count == k:
                break
        else:
            ceiling = middle
    kth, floor32 = LAST_KEY, np.int32(floor)
    for j in range(size):
        kth = min(kth, keys[j] if keys[j] >= floor32 else LAST_KEY)
    return kth


@inlined
def _loosely_kth_largest(keys: Array, size: U64, k: U64) -> I32:
    """A key that at least k of keys[:size] reach, and seldom many more than k."""
    peak = np.int32(0)
    for j in range(size):
        peak = max(peak, keys[j])
    floor, ceiling = np.int64(max(peak - SIXTEENTH, np.int32(0))), np.int64(peak) + 1
    if _num_reaching(keys, size, np.int32(floor)) < k:
        floor, ceiling = np.int64(0), floor
    while ceiling - floor > 1:
        middle = (floor + ceiling) >> 1
        count = _num_reaching(keys, size, np.int32(middle))
        if count < k:
            ceiling = middle
        else:
            floor = middle
            if count <= k + (k >> TWO):
                break
    return np.int32(floor)


@inlined
def _num_larger(x: Array, start: U64, size: U64, bound: I32) -> U64:
    """How many of x[start : start + size] reach the bound."""
    count = np.int32(0)
    for j in range(size):
        count += np.int32((np.float32(x[start + j]).view(np.int32) & ABS) >= bound)
    return np.uint64(count)


@inlined
def _fill_sample(x: Array, start: U64, size: U64, first: U64, stride: U64, sample: Array) -> U64:
    """sample = the keys of x[start + first : start + size : stride]; how many."""
    num = (size - first + stride - ONE) // stride
    for j in range(num):
        sample[j] = np.float32(x[start + first + j * stride]).view(np.int32) & ABS
    return num


@inlined
def _sampled_threshold(
    x: Array, start: U64, size: U64, first: U64, stride: U64, density: float, least: U64, sample: Array
) -> I32:
    """`indices.sampled_threshold` of one group."""
    num = _fill_sample(x, start, size, first, stride, sample)
    rank = max(np.uint64(np.ceil(density * np.float64(num) - 1e-9)), ONE)
    bound = min(_kth_largest(sample, num, rank, np.int32(0)), LARGEST_FINITE)
    tries = 0
    while tries < MAX_ADAPTATIONS and _num_larger(x, start, size, bound) < least:
        bound = np.float32(np.int32(bound).view(np.float32) * SHRINK).view(np.int32)
        tries += 1
    return bound


@inlined
def _bound_of_candidates(x: Array, start: U64, size: U64, k: U64, sample: Array) -> I32:
    """A key that most likely at least k elements reach, and seldom many more: by a sample."""
    num = _fill_sample(x, start, size, ZERO, SAMPLE_STRIDE, sample)
    rank = num * k // size
    rank += (rank >> ONE) + MARGIN
    return np.int32(0) if rank > num else _loosely_kth_largest(sample, num, rank)


@inlined
def _gather(x: Array, start: U64, size: U64, bound: I32, keys: Array, candidates: Array) -> U64:
    """keys, candidates = the keys of x[start : start + size] that reach the bound, and their indices; how many.

    Most are far below: 32 are compared at once, and only those that reach it are looked at.
    """
    num, whole = ZERO, size - size % LANES
    for j in range(ZERO, whole, LANES):
        bits = reaching(x, start + j, bound)
        while bits:
            place = j + np.uint64(lowest_bit(bits))
            bits = np.uint32(bits & np.uint32(bits - LOWEST))
            keys[num], candidates[num] = np.float32(x[start + place]).view(np.int32) & ABS, place
            num += ONE
    for i in range(whole, size):
        key = np.float32(x[start + i]).view(np.int32) & ABS
        if key >= bound:
            keys[num], candidates[num] = key, i
            num += ONE
    return num


@inlined
def _select(keys: Array, candidates: Array, num: U64, k: U64, bound: I32, chosen: Array) -> None:
    """chosen[:k] = ascending indices of the k largest keys, those below `bound`, which are not in `keys`, all equal."""
    found, taken = ZERO, ZERO
    if num < k:
        fillers, j = k - num, ZERO
        while fillers:
            if taken < num and np.uint64(candidates[taken]) == j:
                taken += ONE
            else:
                fillers -= ONE
            chosen[found] = j
            found, j = found + ONE, j + ONE
        for i in range(taken, num):
            chosen[found] = candidates[i]
            found += ONE
        return
    last = _kth_largest(keys, num, k, bound)
    ties = np.int64(k - _num_reaching(keys, num, last)) + _num_equal(keys, num, last)
    # Every candidate is stored where the next chosen one belongs: no branch to guess.
    for i in range(num):
        chosen[found] = candidates[i]
        ties_here = np.int64(keys[i] == last) & np.int64(ties > 0)
        ties -= ties_here
        found += np.uint64(ties_here | np.int64(keys[i] > last))


@inlined
def _store(chosen: Array, k: U64, low: U64, upper: U64, num_bytes: U64, out: Array, at: U64) -> None:
    """`indices.store` of one group to out[at:]."""
    for j in range(num_bytes):
        out[at + j] = np.uint8(0)
    held, num_held, byte = ZERO, ZERO, at
    for i in range(k):
        held |= (np.uint64(chosen[i]) & ((ONE << low) - ONE)) << num_held
        num_held += low
        while num_held >= EIGHT:
            out[byte] = np.uint8(held)
            held, num_held, byte = held >> EIGHT, num_held - EIGHT, byte + ONE
    if num_held:
        out[byte] = np.uint8(held)
    if upper:
        for i in range(k):
            place = k * low + (np.uint64(chosen[i]) >> low) + i
            out[at + (place >> THREE)] |= np.uint8(ONE << (place & SEVEN))


@inlined
def _load_low(stored: Array, at: U64, bit: U64, low: U64) -> U64:
    """The `low` bits from `bit` on."""
    value, done = ZERO, ZERO
    while done < low:
        offset = bit & SEVEN
        room = min(EIGHT - offset, low - done)
        part = (np.uint64(stored[at + (bit >> THREE)]) >> offset) & ((ONE << room) - ONE)
        value, done, bit = value | part << done, done + room, bit + room
    return value


@inlined
def _load(stored: Array, at: U64, k: U64, low: U64, upper: U64, chosen: Array) -> None:
    """`indices.load` of one group to chosen[:k]; chosen[k] is scratch."""
    if upper:
        first, found = k * low, ZERO
        for place in range(upper):
            bit = first + place
            chosen[found] = (place - found) << low
            found = min(found + ((np.uint64(stored[at + (bit >> THREE)]) >> (bit & SEVEN)) & ONE), k)
    else:
        for i in range(k):
            chosen[i] = 0
    for i in range(k):
        chosen[i] |= _load_low(stored, at, i * low, low)


@kernel
def encode_largest(
    x: Array,
    picked: Array,
    stored: Array,
    layouts: Array,
    stride: U64,
    density: float,
    seed: U64,
    counter: U64,
    keys: Array,
    sample: Array,
    candidates: Array,
    chosen: Array,
    draws: Array,
) -> None:
    """Flat fp32 x -> the values that travel, in order, and their indices.

    layouts: uint64 [2, 6], whole groups and the tail: size, num, low, upper, num_bytes of `IndexLayout`, and the
    least number of keys to reach the threshold. stride, density, seed, counter: of the threshold's sample; stride 0 for
    the exact k largest. Scratch: keys, sample, candidates, int32 [group]; chosen, int64 [count + 1]; draws, int32 [1].
    """
    num, group, stride = np.uint64(x.size), layouts[0, 0], np.uint64(stride)
    start, at, index, value_at = ZERO, ZERO, ZERO, ZERO
    while start < num:
        row = 0 if num - start >= group else 1
        size, k, low, upper, num_bytes, least = layouts[row]
        if stride:
            fill_draws(draws, ONE, seed, counter + index)
            first = (np.uint64(draws[0]) * min(stride, size)) >> DRAW_BITS
            bound = _sampled_threshold(x, start, size, first, stride, density, least, sample)
        else:
            bound = _bound_of_candidates(x, start, size, k, sample)
        num_candidates = _gather(x, start, size, bound, keys, candidates)
        if num_candidates < k and not stride:
            # The sample has misled.
            bound, num_candidates = np.int32(0), _gather(x, start, size, np.int32(0), keys, candidates)
        _select(keys, candidates, num_candidates, k, bound, chosen)
        for i in range(k):
            picked[value_at + i] = x[start + np.uint64(chosen[i])]
        _store(chosen, k, low, upper, num_bytes, stored, at)
        start, at, index, value_at = start + size, at + num_bytes, index + ONE, value_at + k


@kernel
def decode_largest(stored: Array, values: Array, out: Array, layouts: Array, add: bool, chosen: Array) -> None:
    """Indices and values -> out = values at their indices, 0 elsewhere; or out += that. Arguments as above."""
    num, group = np.uint64(out.size), layouts[0, 0]
    start, at, value_at = ZERO, ZERO, ZERO
    while start < num:
        size, k, low, upper, num_bytes, _ = layouts[0 if num - start >= group else 1]
        _load(stored, at, k, low, upper, chosen)
        if not add:
            for j in range(size):
                out[start + j] = np.float32(0)
        for i in range(k):
            place = start + min(np.uint64(chosen[i]), size - ONE)
            if add:
                out[place] += values[value_at + i]
            else:
                out[place] = values[value_at + i]
        start, at, value_at = start + size, at + num_bytes, value_at + k


@kernel
def encode_picks(x: Array, picked: Array, every: U64, scaled: bool, seed: U64, counter: U64, draws: Array) -> None:
    """picked[c] = one element of cell c (times the cell's size if `scaled`), or NaN where the cell is not finite."""
    num, cells, every, first = np.uint64(x.size), np.uint64(picked.size), np.uint64(every), ZERO
    while first < cells:
        count = min(np.uint64(draws.size), cells - first)
        fill_draws(draws, count, seed, counter + first)
        for c in range(count):
            start = (first + c) * every
            size = min(every, num - start)
            value = x[start + ((np.uint64(draws[c]) * size) >> DRAW_BITS)]
            damaged = peak_bits(x, start, size) >= INF_BITS
            picked[first + c] = NAN if damaged else value * (np.float32(size) if scaled else np.float32(1))
        first += count


@kernel
def decode_picks(values: Array, out: Array, every: U64, add: bool, seed: U64, counter: U64, draws: Array) -> None:
    """out = each value at its cell's pick, 0 elsewhere, and NaN in the whole cell of a NaN; or out += that."""
    num, cells, every, first = np.uint64(out.size), np.uint64(values.size), np.uint64(every), ZERO
    while first < cells:
        count = min(np.uint64(draws.size), cells - first)
        fill_draws(draws, count, seed, counter + first)
        for c in range(count):
            start = (first + c) * every
            size, value = min(every, num - start), values[first + c]
            if np.isnan(value) or not add:
                fill = value if np.isnan(value) else np.float32(0)
                for j in range(size):
                    out[start + j] = fill
            place = start + ((np.uint64(draws[c]) * size) >> DRAW_BITS)
            if add:
                out[place] += value
            else:
                out[place] = value
        first += count
