"""Layouts of one parameter on several ranks, and how the ranks' shards become the whole.

Source: Universal Checkpointing (Lian, Jacobs et al.), the parameter patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire.errors import ConfigError


class RankLayout(Protocol):
    """The layout of one parameter on several ranks."""

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the ranks' shards, in rank order, into the whole. Raises ConfigError if they contradict the layout."""
        ...


@dataclass(frozen=True)
class Unique:
    """Exactly one rank, or one pipeline stage, holds the parameter."""

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The only shard."""
        if len(shards) != 1:
            raise ConfigError(f"{len(shards)} ranks hold it, but its rule expects one")
        return shards[0]


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the same bits."""

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The first shard, when all are equal."""
        odd = [rank for rank, shard in enumerate(shards) if not torch.equal(shard, shards[0])]
        if odd:
            raise ConfigError(f"rank(s) {odd} hold other values than rank 0, and its rule says that all are equal")
        return shards[0]


@dataclass(frozen=True)
class Averaged:
    """Every rank holds values of its own; the parameter is their mean."""

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Sum of the shards in rank order, divided by the number of ranks; fp32."""
        total = shards[0].float().clone()
        for shard in shards[1:]:
            total += shard
        return total / len(shards)


@dataclass(frozen=True)
class Sharded:
    """Cut along `dim`: rank r holds the r-th part. Parts may differ in length."""

    dim: int = 0

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate the shards along `dim`."""
        return torch.cat(list(shards), self.dim)


@dataclass(frozen=True)
class FusedShards:
    """Several tensors in one, each cut along `dim` separately: rank r holds [a_r; b_r; ...].

    Concatenating the shards would give [a_0; b_0; a_1; b_1], which is wrong without any error.

    parts: lengths of the tensors along `dim`, in any unit: (1, 1) for gate and up; (8, 2, 2) for eight heads of queries
    with two of keys and two of values.
    """

    parts: tuple[int, ...]
    dim: int = 0

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """[a; b; ...], each tensor whole."""
        pieces = [shard.split(self._lengths(shard.shape[self.dim]), self.dim) for shard in shards]
        return torch.cat([piece for same in zip(*pieces, strict=True) for piece in same], self.dim)

    def _lengths(self, length: int) -> list[int]:
        unit, rest = divmod(length, sum(self.parts))
        if rest:
            raise ConfigError(
                f"{length} rows on a rank are not cut into parts of {self.parts}: no multiple of their sum"
            )
        return [part * unit for part in self.parts]
