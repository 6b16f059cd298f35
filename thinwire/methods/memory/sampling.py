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


def num_certain(shares: Tensor, num: int) -> Tensor:
    """How many of the largest shares are kept for certain, when `num` are kept: c below it with the least bound.

    The bound is (1 - P_c) / (num - c), with P_c the sum of the c largest. shares: fp64 [..., n], descending, of sum 1.
    """
    left = 1 - torch.cat([torch.zeros_like(shares[..., :1]), shares.cumsum(-1)], dim=-1)[..., :num]
    return (left / torch.arange(num, 0, -1, device=shares.device)).argmin(-1)


def chosen(weights: Tensor, num: int, seed: int) -> tuple[Tensor, Tensor]:
    """The rows to keep, int64 [..., num], and what each is multiplied by, fp32 [..., num]; of each matrix by itself.

    With p = weights / their sum, the c largest are kept as they are, see `num_certain`. The others are drawn with
    replacement by p / (1 - P_c) and count (1 - P_c) / ((num - c) p) times. So for any columns h and z that belong to
    the rows, the sum of the kept h^T z is that of all in the mean. Where no weight is finite and above 0, all weigh
    alike.

    Args:
        weights: [..., n], not negative; below n rows, those of weight 0 are never kept.
        num: from 1 to n; n keeps all rows as they are.

    Source: Liu et al., "Winner-take-all column row sampling for memory efficient adaptation of language model"
    (NeurIPS 2023), section 3; it also leaves the draws out where P_c is above 0.999.
    """
    size = weights.shape[-1]
    if num == size:
        # In the order of the rows, so that sums have the bits of a plain layer's.
        index = torch.arange(num, device=weights.device).expand(weights.shape)
        return index, torch.ones(weights.shape, device=weights.device)
    each = weights.reshape(-1, size).double()
    total = each.sum(1, keepdim=True)
    each = torch.where(torch.isfinite(total) & (total > 0), each / total, 1 / size)
    shares, order = each.sort(dim=1, descending=True, stable=True)
    certain = num_certain(shares, num).unsqueeze(1)
    rest = torch.where(torch.arange(size, device=weights.device) < certain, 0, shares)
    mass = rest.sum(1, keepdim=True)
    place = torch.arange(num, device=weights.device)
    drawn = uniform(seed, 0, len(each) * num).view(-1, num).double().to(weights.device)
    drawn = drawn.gather(1, (place - certain).clamp(min=0)) * mass
    at = torch.searchsorted(rest.cumsum(1), drawn)
    at = torch.minimum(at, (shares > 0).sum(1, keepdim=True) - 1).maximum(certain)
    at = torch.where(place < certain, place, at)
    picked = shares.gather(1, at)
    scales = torch.where(place < certain, 1, mass / ((num - certain) * picked))
    scales = torch.where(picked > 0, scales, 0).float()
    kept = (*weights.shape[:-1], num)
    return order.gather(1, at).view(kept), scales.view(kept)
