"""The capacity of experts: how many rows an expert takes, and how many were requested and dropped on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.errors import ConfigError


def capacity(factor: float, num_tokens: int, num_experts: int, top_k: int, most: int) -> int:
    """Most rows that an expert takes. most: rows that the fullest expert is asked for.

    k * int(f * ceil(T / E)) for f > 0; `most` for f = 0; for f < 0 the smaller of `most` and the formula with -f.
    Source: Hwang et al., "Tutel" (MLSys 2023), section 3.
    """
    bound = top_k * int(abs(factor) * math.ceil(num_tokens / num_experts))
    if factor > 0:
        return bound
    return min(most, bound) if factor < 0 else most


def needed_factor(most: int, num_tokens: int, num_experts: int, top_k: int) -> float:
    """The smallest factor, to 3 decimals, with room for `most` rows."""
    each = math.ceil(num_tokens / num_experts)
    # A quotient in binary may be too small by its last bit.
    return math.ceil(1000 * math.ceil(most / top_k) / each) / 1000 if each else 0.0


def check_capacity(factor: float, num_tokens: int, num_experts: int, top_k: int) -> int:
    """The capacity for a rank's number of tokens; 0: no limit. Raises ConfigError for a capacity below one row."""
    if not factor:
        return 0
    found = capacity(factor, num_tokens, num_experts, top_k, num_tokens)
    if not found:
        near = math.copysign(needed_factor(1, num_tokens, num_experts, top_k), factor)
        raise ConfigError(
            f"capacity_factor={factor}: of {num_tokens} tokens of a rank, an expert of {num_experts} would take no "
            f"row; nearest: {near}"
        )
    return found


@dataclass(frozen=True)
class RowLoad:
    """Rows that routers sent to experts, on all ranks and in all layers.

    asked: requested rows. dropped: those above a capacity. needed: the smallest capacity factor that would have dropped
    none. counts: requested rows, fp64 [ranks, layers, experts]; None: nothing was counted.
    """

    asked: int = 0
    dropped: int = 0
    needed: float = 0.0
    counts: Tensor | None = field(default=None, compare=False)

    @property
    def dropped_share(self) -> float:
        """The share of dropped rows among the requested ones."""
        return self.dropped / self.asked if self.asked else 0.0


class RowCounts:
    """Sums up the rows of experts over micro-batches. top_k: experts per token."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._counts: Tensor | None = None
        self._dropped = self._needed = torch.zeros(())

    def note(self, num_tokens: Tensor, asked: Tensor, factor: float) -> None:
        """Add a micro-batch: tokens of each rank, [ranks]; requested rows, [ranks, layers, experts].

        The capacity factor.

        Reads nothing from a GPU.
        """
        asked = asked.double()
        each = (num_tokens.double() / asked.shape[-1]).ceil()
        most = asked.amax((1, 2))
        self._counts = asked if self._counts is None else self._counts + asked
        if factor:
            limit = self.top_k * (abs(factor) * each).floor()
            self._dropped = self._dropped + (asked - limit[:, None, None]).clamp_min(0).sum()
        needed = (most / self.top_k).ceil() / each.clamp_min(1)
        self._needed = torch.maximum(self._needed.to(needed), needed.max())

    def take(self) -> RowLoad:
        """The sums since the last call."""
        counts = None if self._counts is None else self._counts.cpu()
        asked = 0 if counts is None else int(counts.sum())
        found = RowLoad(asked, int(self._dropped), math.ceil(1000 * float(self._needed)) / 1000, counts)
        self._counts, self._dropped, self._needed = None, torch.zeros(()), torch.zeros(())
        return found
