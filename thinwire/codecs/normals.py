"""Normal numbers as a pure function of (seed, counter): drawn anew wherever they are needed, never stored or sent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends
from thinwire.codecs.random import MASK64, draws, noise_keys

QUANTILE_BITS = 12
# Elements to which all seeds' numbers are added before the next ones: they stay in the first-level cache.
BLOCK = 2048


@functools.cache
def quantiles() -> Tensor:
    """The 4096 mid-quantiles of the normal distribution, scaled to unit variance, in multiples of 2^-16: fp32.

    Rounded so coarsely that the last bits of a machine's logarithm can't be seen: all machines draw the same numbers.
    """
    count = 1 << QUANTILE_BITS
    exact = torch.tensor([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64)
    return ((exact / exact.square().mean().sqrt() * 2**16).round() / 2**16).to(torch.float32)


def normals(seed: int, counter: int, num_elements: int, device: torch.device | None = None) -> Tensor:
    """fp32 [num_elements] of mean 0 and variance 1: element i is the quantile that draw counter + i of the seed names.

    Symmetric, within 3.67, of fourth moment 2.97 where a normal distribution has 3.
    """
    random = draws(*noise_keys(seed, counter, num_elements, device), num_elements)
    return quantiles().to(random.device)[random >> 23 - QUANTILE_BITS]


def add_normals(counter: int, base: Tensor, out: Tensor, seeds: Sequence[int], scales: Sequence[float]) -> Tensor:
    """out = (base + scales[0] z_0) + scales[1] z_1 + ..., added in this order; z_i = normals(seeds[i], counter, n).

    base, out: flat contiguous fp32, of one length, and may be the same. scales are rounded to fp32 first; products and
    sums are rounded one by one, so every machine gets the same bits.
    """
    factors = np.array(scales, dtype=np.float32)
    kernels = backends.numba_module("normals", out.device)
    if kernels is None:
        out.copy_(base)
        for seed, factor in zip(seeds, factors.tolist(), strict=True):
            out += normals(seed, counter, out.numel(), out.device) * factor
        return out
    words = np.array([seed & MASK64 for seed in seeds], dtype=np.uint64)
    kernels.add_normals(
        base.numpy(), out.numpy(), words, factors, quantiles().numpy(), np.uint64(counter & MASK64),
        np.empty(min(BLOCK, out.numel()), np.int32),
    )  # fmt: skip
    return out
