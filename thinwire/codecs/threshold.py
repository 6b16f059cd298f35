"""The elements above a threshold that is estimated from a sample, as DGC does; in the packets of TopK."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import checks, indices
from thinwire.codecs.base import Traits
from thinwire.codecs.random import MASK64, derive_seed, draws, noise_keys
from thinwire.codecs.spelling import Number, percent_of, share_of, spelled
from thinwire.codecs.topk import TopK

SAMPLE = 1  # part of the sample's seed, so that its start is independent of the rounding of values


@spelled(
    Number("density", "threshold", "%", share_of, percent_of, optional=True),
    Number("stride", "stride"),
    group="group",
    values="values",
)
@dataclass(frozen=True)
class Threshold(TopK):
    """The elements of every `group` with |x| >= t, where t is the sample's k-th largest, k = ceil(density * size).

    The sample is every `stride`-th element from a random start. t shrinks by 0.8 until 0.8 k elements reach it, at most
    10 times; of more than k the k largest travel (DGC's re-selection), and of fewer all, with the first others in the
    places left, since a packet has k places whatever comes. density, group, values, packet, NaN: as TopK.
    Raises ConfigError for a stride below 1 or beyond the group. Source: DGC (ICLR 2018), section 3.1 and its code.
    """

    group: int = 1 << 16
    stride: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("threshold stride", self.stride, 1, self.group)

    @property
    def traits(self) -> Traits:
        found = super().traits
        return replace(found, draws=found.draws or self.stride > 1)

    def _least(self, count: int) -> int:
        return -(-4 * count // 5)

    def _sampling(self, seed: int, counter: int) -> tuple[int, float, np.uint64, np.uint64]:
        sample_seed, sample_counter = derive_seed(seed, SAMPLE), counter // self.group & MASK64
        return self.stride, self.density, np.uint64(sample_seed), np.uint64(sample_counter)

    def _choose(self, x: Tensor, count: int, seed: int, counter: int) -> Tensor:
        rows, size = x.shape
        keys = x.view(torch.int32) & indices.ABS
        random = draws(*noise_keys(derive_seed(seed, SAMPLE), counter, rows, x.device), rows)
        starts = random * min(self.stride, size) >> 23
        bound = indices.sampled_threshold(keys, starts, self.stride, self.density, self._least(count))
        return indices.largest(torch.where(keys >= bound, keys, -1), count)
