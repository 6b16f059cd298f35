"""How one tensor grows: each dimension follows an axis of the model, and the effects of new weights cancel.

Source: Wang et al., "LEMON: lossless model expansion" (ICLR 2024), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.random import uniform

Residue = Literal["circular", "average", "zero"]
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class GrownAxis:
    """A dimension that grows from `small` to `large` entries: entry j is a copy of entry j mod small.

    Attributes:
        residue: what the last large mod small entries become. circular: copies too; average: the mean of all small
            entries; zero: 0.
        unit: number of entries that are copied together, such as a head's; divides `small` and, if circular, `large`.
        copied: number of first entries that are copied, if not all of `small`.
        parts: number of equal axes that lie one after another, such as those of queries, keys and values in one matrix.
    """

    small: int
    large: int
    residue: Residue = "circular"
    unit: int = 1
    copied: int | None = None
    parts: int = 1

    @property
    def kappa(self) -> float:
        """Mean square of a widened vector (residue zero) over that of the small one: floor(large/small) small/large."""
        return self.large // self.small * self.small / self.large

    def sources(self) -> Tensor:
        """The small entry of each large one, int64 [parts * large]; -1 for an entry of the residue that is no copy."""
        copied = self.copied or self.small
        entries = torch.arange(self.large)
        found = entries % copied
        if self.residue != "circular":
            found[entries >= self.large // copied * copied] = -1
        starts = torch.arange(self.parts)[:, None] * self.small
        return torch.where(found < 0, -1, found + starts).flatten()

    def paired(self) -> GrownAxis | None:
        """The axis with fewer entries copied, so that each has a second copy; None if there is not enough room."""
        pairs = min(self.small // self.unit, self.large // self.unit // 2)
        return replace(self, copied=pairs * self.unit) if pairs else None

    def write(self, small: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Entries start .. stop - 1 of dimension 0 of the large tensor, from a small tensor [parts * small, ...]."""
        sources = self.sources()[start:stop]
        found = small[sources.clamp_min(0)]
        if self.residue != "circular" and bool((sources < 0).any()):
            found[sources < 0] = small.mean(0) if self.residue == "average" else torch.zeros_like(small[0])
        return found


def expand_matrix(
    weight: Tensor,
    out: GrownAxis,
    into: GrownAxis,
    seed: int,
    *,
    start: int = 0,
    stop: int | None = None,
    columns: slice = slice(None),
    adds_zero: bool = False,
) -> Tensor:
    """Rows start .. stop - 1 of the matrix [out.large, into.large] that a matrix [out.small, into.small] becomes.

    With r(i) the row that row i copies, c(j) the column that column j copies, and G(c) all its copies:
    W'[i, j] = W[r(i), c(j)] / |G(c(j))| + R[i, j] - mean of R[i, G(c(j))], where R[i, j] is drawn from
    (seed, i * into.large + j), with the standard deviation of W. So the weights of an input's copies differ, and add up
    to W. In a residue of zeros, W' = R. In a residue of equal averages, W' = R minus its mean over the residue.

    Args:
        weight: floating, [out.parts * out.small, into.small].
        columns: of these rows, the entries that are returned.
        adds_zero: use 0 in place of W, so that the product is 0.

    Returns `weight`'s dtype; computed in fp64, some rows at a time.
    """
    stop = out.parts * out.large if stop is None else stop
    found = weight.new_empty(stop - start, len(range(into.large)[columns]))
    scale = math.sqrt(12) * float(weight.double().std(correction=0))
    rows = max(1, BLOCK_ELEMENTS // into.large)
    for first in range(start, stop, rows):
        last = min(first + rows, stop)
        small = out.write(weight, first, last).double()
        draws = uniform(seed, first * into.large, (last - first) * into.large).double().view(last - first, -1)
        whole = cancelling(small * (not adds_zero), into, (draws - 0.5) * scale)
        found[first - start : last - start] = whole[:, columns]
    return found


def cancelling(small: Tensor, into: GrownAxis, draws: Tensor) -> Tensor:
    """Rows [rows, into.large] whose copies of an input add up to `small` [rows, into.small]; see expand_matrix."""
    sources = into.sources()
    copies = sources >= 0
    group = sources[copies]
    counts = torch.bincount(group, minlength=into.small).clamp_min(1)
    sums = draws.new_zeros(len(draws), into.small).index_add(1, group, draws[:, copies])
    found = draws.clone()
    # In this order, the only copy of an input is W to the bit.
    found[:, copies] = (draws[:, copies] - (sums / counts)[:, group]) + (small / counts)[:, group]
    if into.residue == "average" and not bool(copies.all()):
        found[:, ~copies] -= found[:, ~copies].mean(1, keepdim=True)
    return found


def expand_gain(gain: Tensor, axis: GrownAxis, seed: int) -> Tensor:
    """A norm's factors [axis.large]: sqrt(kappa) times copies; in the residue, drawn with their mean and deviation.

    A widened vector has kappa times the mean square (or variance), so its norm also needs kappa times the eps. The
    residue is zero behind the norm, so its factors may have any value.
    """
    small = gain.double() * math.sqrt(axis.kappa)
    draws = (uniform(seed, 0, axis.large).double() - 0.5) * math.sqrt(12) * small.std(correction=0) + small.mean()
    sources = axis.sources()
    return torch.where(sources < 0, draws, small[sources.clamp_min(0)]).to(gain.dtype)


def layer_plan(small: int, large: int) -> Iterator[tuple[int, bool]]:
    """For each of `large` layers: the layer of `small` that it copies, and whether it is inserted and adds nothing.

    small <= large <= 2 small: the first 2 small - large layers stay alone; each of the others is followed by a new one.
    """
    for layer in range(small):
        yield layer, False
        if layer >= 2 * small - large:
            yield layer, True
