"""The norm of mean gradients that are cut over ranks: each element counts on one rank of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.hosts.ranks import Ranks
from thinwire.hosts.sharded.bucket import FlatBucket
from thinwire.hosts.sharded.gradients import Gradients


class Norms:
    """2-norms of this rank's slices of the mean gradient, wherever the gradients lie."""

    def __init__(self, ranks: Ranks, buckets: Sequence[FlatBucket], gradients: Gradients) -> None:
        self._ranks, self._buckets, self._gradients = ranks, buckets, gradients

    @property
    def squares(self) -> float:
        """Sum of squares of the elements that this rank counts."""
        taken = self._gradients.keeper
        norms = (self.of(bucket) if taken is None else taken.norms[bucket] for bucket in self._buckets)
        return sum((norm * norm for own in norms for norm in own), 0.0)

    def of(self, bucket: FlatBucket) -> list[float]:
        """2-norms of the parts of a bucket's mean gradient that this rank counts."""
        counted = [slot.owned for slot in bucket.slots if self._ranks.counts(slot.name)]
        is_whole = len(counted) == len(bucket.slots)
        pieces = [slice(None)] if is_whole else counted
        return [float(torch.linalg.vector_norm(bucket.shard_grad[piece], dtype=torch.float64)) for piece in pieces]
