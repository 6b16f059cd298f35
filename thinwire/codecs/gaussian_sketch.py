"""Gaussian sketch: each group times one random matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends, checks
from thinwire.codecs.normals import add_normals
from thinwire.codecs.sketch import UNBIASED, LinearSketch
from thinwire.codecs.spelling import Number, spelled

MAX_GROUP = 4096  # its matrix takes 4 group^2 / ratio bytes


@spelled(Number("ratio", "gaussiansketch", optional=True), UNBIASED, group="group")
@dataclass(frozen=True)
class GaussianSketch(LinearSketch):
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

    def _best_shrink(self, size: int, num_buckets: int) -> float:
        return num_buckets / (num_buckets + size + 1)

    def _matrix(self, seed: int, device: torch.device) -> Tensor:
        """G^T, fp32 [n, b]: entry (j, k) is the normal number j b + k of the seed."""
        buckets = self.group // self.ratio
        matrix = torch.zeros(self.group * buckets, device=device)
        return add_normals(0, matrix, matrix, [seed], [1.0]).view(self.group, buckets)

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
