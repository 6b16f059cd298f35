"""Gaussian sketch: each group times one random matrix."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks
from thinwire.codecs.random import MASK64, draws, noise_keys
from thinwire.codecs.sketch import Sketch

QUANTILE_BITS = 12
MAX_GROUP = 4096  # its matrix takes 4 group^2 / ratio bytes


@functools.cache
def quantiles() -> Tensor:
    """The 4096 mid-quantiles of the normal distribution, scaled to unit variance, in multiples of 2^-16: fp32.

    Rounded so coarsely that the last bits of a machine's logarithm can't be seen: all machines draw the same matrix.
    """
    count = 1 << QUANTILE_BITS
    exact = torch.tensor([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64)
    return ((exact / exact.square().mean().sqrt() * 2**16).round() / 2**16).to(torch.float32)


@dataclass(frozen=True)
class GaussianSketch(Sketch):
    """R = G / sqrt(b), G of independent normal entries [b, n]; decoded: gamma R^T y.

    E|C(x) - x|^2 = (n + 1)/b |x|^2 for gamma = 1, as large as a count sketch's, but no two elements collide as a whole:
    the error of each is nearly Gaussian. 2 n / ratio additions an element each way, so groups are small, at most 4096.
    G is drawn from the seed alone, one for all groups, from 4096 quantiles; sums run in the order of the elements, then
    of the sums, so that every machine gets the same bits. Else as Sketch.
    Source: Indyk and Motwani, "Approximate nearest neighbors" (1998), after Johnson and Lindenstrauss (1984).
    """

    group: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("gaussiansketch group", self.group, 2, MAX_GROUP)

    def __str__(self) -> str:
        return f"gaussian sketch, {self.ratio} elements to a sum, groups of {self.group}"

    def _best_shrink(self, size: int, num_buckets: int) -> float:
        return num_buckets / (num_buckets + size + 1)

    def _matrix(self, seed: int, device: torch.device) -> Tensor:
        """G^T, fp32 [n, b]: entry (j, k) is the quantile that draw j b + k of the seed points at."""
        buckets = self.group // self.ratio
        num = self.group * buckets
        kernels = backends.numba_module("sketch", device)
        if kernels is None:
            random = draws(*noise_keys(seed, 0, num, device), num)
            return quantiles().to(device)[random >> 23 - QUANTILE_BITS].view(self.group, buckets)
        matrix, scratch = torch.empty(self.group, buckets), np.empty(num, np.int32)
        kernels.fill_matrix(matrix.view(-1).numpy(), quantiles().numpy(), np.uint64(seed & MASK64), scratch)
        return matrix

    def _project(self, x: Tensor, sums: Tensor, seed: int, counter: int) -> None:
        matrix = self._matrix(seed, x.device)
        for part in self.parts(x.numel()):
            rows, totals = x[part.elements].view(-1, part.size), sums[part.buckets].view(-1, part.num_buckets)
            _multiply(rows, matrix, totals, part.num_buckets**-0.5, add=False)

    def _estimate(self, sums: Tensor, out: Tensor, seed: int, counter: int, *, add: bool) -> None:
        transposed = self._matrix(seed, sums.device).t().contiguous()
        for part in self.parts(out.numel()):
            rows, totals = out[part.elements].view(-1, part.size), sums[part.buckets].view(-1, part.num_buckets)
            _multiply(totals, transposed, rows, part.shrink * part.num_buckets**-0.5, add=add)


def _multiply(rows: Tensor, matrix: Tensor, out: Tensor, scale: float, *, add: bool) -> None:
    """out = (rows @ matrix[:n, :b]) * scale, or out += that, each sum in the order of its terms: [r, n] -> [r, b]."""
    factor, width = np.float32(scale), out.shape[1]
    kernels = backends.numba_module("sketch", rows.device)
    if kernels is not None:
        scratch = np.empty(width, np.float32)
        kernels.multiply(rows.numpy(), matrix.numpy(), out.detach().numpy(), factor, add, scratch)
        return
    total = torch.zeros_like(out)
    for j in range(rows.shape[1]):
        total += rows[:, j : j + 1] * matrix[j, :width]
    total *= float(factor)
    out.add_(total) if add else out.copy_(total)
