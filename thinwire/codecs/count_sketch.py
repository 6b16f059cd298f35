"""Count sketch: every element is added, with a random sign, to one random sum of its group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import backends
from thinwire.codecs.random import MASK64, draws, noise_keys
from thinwire.codecs.sketch import UNBIASED, LinearSketch
from thinwire.codecs.spelling import Number, spelled


@spelled(Number("ratio", "countsketch", optional=True), UNBIASED, group="group")
@dataclass(frozen=True)
class CountSketch(LinearSketch):
    """Element j goes to sum p(j) with sign s(j), hashes of (seed, counter + j); decoded: gamma s(j) y[p(j)].

    y_p = sum over p(j) = p of s(j) x_j, so an element's error is the signed sum of those that share its place:
    E|C(x) - x|^2 = (n - 1)/b |x|^2 for gamma = 1. One addition an element each way. Else as Sketch.
    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (2002), one row, mean estimate.
    """

    def _best_shrink(self, size: int, num_buckets: int) -> float:
        return num_buckets / (num_buckets + size - 1)

    def _hash(self, num_elements: int, seed: int, counter: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(place of each element among all sums, int64; its sign, fp32), [num_elements] both."""
        random = draws(*noise_keys(seed, counter, num_elements, device), num_elements)
        places = torch.empty_like(random)
        for part in self.parts(num_elements):
            rows = random[part.elements].view(-1, part.size)
            first = torch.arange(len(rows), device=device)[:, None] * part.num_buckets + part.buckets.start
            places[part.elements] = (first + ((rows >> 1) * part.num_buckets >> 22)).flatten()
        return places, (1 - 2 * (random & 1)).to(torch.float32)

    def _project(self, x: Tensor, sums: Tensor, seed: int, counter: int) -> None:
        kernels = backends.numba_module("sketch", x.device)
        if kernels is None:
            places, signs = self._hash(x.numel(), seed, counter, x.device)
            sums.zero_().index_add_(0, places, x * signs)
            return
        kernels.count(x.numpy(), sums.numpy(), self.group, self.ratio, *self._random(seed, counter))

    def _estimate(self, sums: Tensor, out: Tensor, seed: int, counter: int, *, add: bool) -> None:
        kernels = backends.numba_module("sketch", sums.device)
        if kernels is None:
            places, signs = self._hash(out.numel(), seed, counter, sums.device)
            values = sums[places] * signs
            for part in self.parts(out.numel()):
                values[part.elements] *= part.shrink
            out.add_(values) if add else out.copy_(values)
            return
        shrinks = np.float32(self._shrink(self.group)), np.float32(self._shrink(out.numel() % self.group or 1))
        random = self._random(seed, counter)
        kernels.uncount(sums.numpy(), out.detach().numpy(), self.group, self.ratio, *shrinks, add, *random)

    def _random(self, seed: int, counter: int) -> tuple[np.uint64, np.uint64, np.ndarray, np.ndarray, np.ndarray]:
        """The kernels' seed, counter and scratch."""
        scratch = (*np.empty((2, self.group), np.int32), np.empty(self.group, np.float32))
        return np.uint64(seed & MASK64), np.uint64(counter & MASK64), *scratch
