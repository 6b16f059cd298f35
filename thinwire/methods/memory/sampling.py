"""WTA-CRS: which rows of a layer's input are kept for its weights' gradient, and how much each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.random import uniform

# Fewer rows are not kept of any input that has as many.
LEAST_ROWS = 10


def num_kept(ratio: float, num_rows: int) -> int:
    """How many of so many rows are kept."""
    return min(num_rows, max(LEAST_ROWS, round(ratio * num_rows)))


def num_certain(shares: Tensor, num: int) -> int:
    """How many of the largest shares are kept for certain, when `num` are kept: c below it with the least bound.

    The bound is (1 - P_c) / (num - c), with P_c the sum of the c largest. shares: fp64 [n], descending, of sum 1.
    """
    left = 1 - torch.cat([shares.new_zeros(1), shares.cumsum(0)])[:num]
    return int((left / torch.arange(num, 0, -1, device=shares.device)).argmin())


def chosen(weights: Tensor, num: int, seed: int) -> tuple[Tensor, Tensor]:
    """The rows to keep, int64 [num], and what each is multiplied by, fp32 [num].

    With p = weights / their sum, the c largest are kept as they are, see `num_certain`. The others are drawn with
    replacement by p / (1 - P_c) and count (1 - P_c) / ((num - c) p) times. So for any columns h and z that belong to
    the rows, the sum of the kept h^T z is that of all in the mean. Where no weight is finite and above 0, all weigh
    alike.

    Args:
        weights: [n], not negative; below n rows, those of weight 0 are never kept.
        num: from 1 to n; n keeps all rows as they are.

    Source: Liu et al., "Winner-take-all column row sampling for memory efficient adaptation of language model"
    (NeurIPS 2023), section 3; it also leaves the draws out where P_c is above 0.999.
    """
    if num == len(weights):
        # In the order of the rows, so that sums have the bits of a plain layer's.
        return torch.arange(num, device=weights.device), torch.ones(num, device=weights.device)
    weights = weights.double()
    total = weights.sum()
    if not (torch.isfinite(total) and total > 0):
        weights, total = torch.ones_like(weights), torch.tensor(float(len(weights)), device=weights.device)
    shares, order = (weights / total).sort(descending=True, stable=True)
    certain = num_certain(shares, num)
    rest = shares[certain:]
    mass = rest.sum()
    if not mass > 0:
        return order[:num], (shares[:num] > 0).float()
    drawn = uniform(seed, 0, num - certain).double().to(weights.device) * mass
    at = torch.searchsorted(rest.cumsum(0), drawn).clamp_(max=int((rest > 0).sum()) - 1)
    index = torch.cat([order[:certain], order[certain + at]])
    scales = torch.cat([rest.new_ones(certain), mass / ((num - certain) * rest[at])])
    return index, scales.float()
