"""Which elements of a group travel: how many, where their indices lie in a packet, and both in plain PyTorch.

k ascending indices below n are stored as Elias and Fano did: the low l bits of each, then the rest in unary, one bit
set at position (index >> l) + i for entry i. That takes k l + k + ((n - 1) >> l) bits whatever the indices are, so the
size is known before encoding; it is 0.5 to 0.8 bits an index above log2(n choose k) / k, the least that any fixed size
can be. The upper part is left out where l bits hold every index. Bits fill bytes from the lowest up; each group ends
with a whole byte.
Source: Elias, "Efficient storage and retrieval by content and address of static files" (1974).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

ABS = 0x7FFFFFFF
MAX_KEY = 0x7F7FFFFF  # the largest finite float
MAX_ADAPTATIONS = 10


@functools.cache
def places(num_elements: int, density: float) -> int:
    """k = ceil(density n), at least 1 of any n >= 1; 1e-9 makes up for the rounding of a decimal density."""
    return max(math.ceil(density * num_elements - 1e-9), min(1, num_elements))


class IndexLayout(NamedTuple):
    """`num` indices below `size`: `low` low bits for each, `upper` bits of unary, `num_bytes` in all."""

    size: int
    num: int
    low: int
    upper: int
    num_bytes: int


@functools.lru_cache(maxsize=1024)
def layout(size: int, count: int) -> IndexLayout:
    """The Elias-Fano layout with the number of low bits that takes the fewest bits."""

    last = max(size - 1, 0)

    def upper(low: int) -> int:
        return count + (last >> low) if last >> low else 0

    low = min(range(last.bit_length() + 1), key=lambda bits: count * bits + upper(bits))
    return IndexLayout(size, count, low, upper(low), -(-(count * low + upper(low)) // 8))


def store(indices: Tensor, to: IndexLayout) -> Tensor:
    """Ascending int64 indices [rows, count] -> uint8 [rows, num_bytes]."""
    low = (indices.unsqueeze(2) >> torch.arange(to.low, device=indices.device)) & 1
    bits = indices.new_zeros(len(indices), to.num_bytes * 8)
    bits[:, : to.num * to.low] = low.flatten(1)
    if to.upper:
        entry = torch.arange(to.num, device=indices.device)
        bits.scatter_(1, (indices >> to.low) + entry + to.num * to.low, 1)
    weights = 1 << torch.arange(8, device=indices.device)
    return (bits.unflatten(1, (-1, 8)) * weights).sum(2).to(torch.uint8)


def load(stored: Tensor, of: IndexLayout) -> Tensor:
    """The inverse of `store`: uint8 [rows, num_bytes] -> int64 [rows, count]."""
    bits = (stored.unsqueeze(2).to(torch.int64) >> torch.arange(8, device=stored.device)).flatten(1) & 1
    low = bits[:, : of.num * of.low].unflatten(1, (of.num, of.low)) << torch.arange(of.low, device=stored.device)
    if not of.upper:
        return low.sum(2)
    upper = bits[:, of.num * of.low :][:, : of.upper].nonzero()[:, 1].view(-1, of.num)
    return (upper - torch.arange(of.num, device=stored.device) << of.low) + low.sum(2)


def largest(keys: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest keys of each row, ascending, int64; of equal keys the first ones."""
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def sampled_threshold(keys: Tensor, starts: Tensor, stride: int, density: float, least: int) -> Tensor:
    """A key that about density n of the n keys of each row reach: int32 [rows, 1].

    keys: int32 |x| bits [rows, n]. Of the sample keys[start :: stride] the ceil(density size)-th largest is taken, at
    most the largest finite one, and multiplied by 0.8 (as a float) until `least` keys reach it, at most 10 times.
    Source: DGC (ICLR 2018), section 3.1 and its published code.
    """
    size = keys.shape[1]
    sizes = (size - starts + stride - 1) // stride
    at = starts[:, None] + torch.arange(0, size, stride, device=keys.device)
    sample = torch.where(at < size, keys.gather(1, at.clamp(max=size - 1)), -1)
    ranks = torch.ceil(density * sizes.double() - 1e-9).long().clamp(min=1)
    bound = sample.sort(dim=1, descending=True).values.gather(1, ranks[:, None] - 1).clamp(max=MAX_KEY)
    for _ in range(MAX_ADAPTATIONS):
        few = (keys >= bound).sum(1, keepdim=True) < least
        bound = torch.where(few, (bound.view(torch.float32) * 0.8).view(torch.int32), bound)
    return bound
