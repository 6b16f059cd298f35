"""The order of experts' rows: sorted by expert, first choices first, and what a capacity drops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """The rows of experts, sorted by expert.

    Shape:
        tokens: int64 [rows], the token of each row.
        choices: int64 [rows], the row's position in the flat [tokens, k] choices.
        counts: int64 [experts], number of rows of each.
    """

    tokens: Tensor
    choices: Tensor
    counts: Tensor

    @classmethod
    def of(cls, index: Tensor, num_experts: int, priority: Tensor | None = None) -> Order:
        """The order for choices int64 [tokens, k]: an expert's rows begin with all first choices, then the second ones.

        The choice `num_experts` is no row. priority: fp32 [tokens]; among equal choices, the highest come first.
        """
        num_tokens, top_k = index.shape
        device = index.device
        tokens = torch.arange(num_tokens, device=device)
        if priority is not None:
            tokens = priority.argsort(descending=True, stable=True)
        chosen = index[tokens].t().reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=num_experts + 1)[:num_experts]
        order = order[: int(counts.sum())]
        token, choice = tokens.repeat(top_k)[order], order // max(num_tokens, 1)
        return cls(token, token * top_k + choice, counts)

    def encode(self, x: Tensor) -> Tensor:
        """The rows [rows, width] of inputs [tokens, width]."""
        return x.index_select(0, self.tokens)

    def decode(self, rows: Tensor, num_tokens: int) -> Tensor:
        """The sum [tokens, width] of each token's rows; zero for a token without one."""
        return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, self.tokens, rows)


def drop(index: Tensor, num_experts: int, limit: int, priority: Tensor | None = None) -> Tensor:
    """The choices [tokens, k], in which those after an expert's first `limit` rows become `num_experts`."""
    order = Order.of(index, num_experts, priority)
    starts = order.counts.cumsum(0) - order.counts
    places = torch.arange(len(order.choices), device=index.device) - starts.repeat_interleave(order.counts)
    flat = index.flatten().clone()
    flat[order.choices[places >= limit]] = num_experts
    return flat.view_as(index)
