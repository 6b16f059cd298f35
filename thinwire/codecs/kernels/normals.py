"""Normal numbers, bit-equal to their plain version."""

from __future__ import annotations

import numpy as np

from thinwire.codecs.kernels.common import U64, ZERO, Array, fill_draws, kernel

QUANTILE_SHIFT = np.int32(11)


@kernel
def add_normals(
    base: Array, out: Array, seeds: Array, scales: Array, quantiles: Array, counter: U64, draws: Array
) -> None:
    """out = base + sum_i scales[i] z_i, block by block in the order of i. draws: int32 scratch, one block."""
    num, block, num_seeds, start = np.uint64(out.size), np.uint64(draws.size), np.uint64(seeds.size), ZERO
    while start < num:
        size = min(block, num - start)
        for j in range(size):
            out[start + j] = base[start + j]
        for i in range(num_seeds):
            scale = scales[i]
            fill_draws(draws, size, seeds[i], counter + start)
            for j in range(size):
                out[start + j] += quantiles[np.uint64(draws[j] >> QUANTILE_SHIFT)] * scale
        start += size
